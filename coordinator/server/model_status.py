"""The served model as the status shows it."""

from __future__ import annotations

from coordinator.status.cluster_status import ModelStatus
from mtp.checkpoint.format.checkpoint import Checkpoint

LETTERS = {"gdn": "g", "attention": "a"}
"""Letters of `ModelStatus.layers` by kind of layer."""


def model_status(checkpoint: Checkpoint) -> ModelStatus:
    """Return the status of a checkpoint, read from its headers."""
    config = checkpoint.config
    bits = (config.quantization or {}).get("bits")
    return ModelStatus(
        layers="".join(LETTERS[kind] for kind in config.layer_kinds),
        has_head=checkpoint.mtp.complete,
        context=config.max_positions,
        quantization=f"{bits}-bit" if bits else "",
        weight_bytes=sum(checkpoint.part_bytes().values()),
    )
