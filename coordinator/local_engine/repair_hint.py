"""Repair hints for checkpoints whose MTP head is missing or incomplete."""

from __future__ import annotations

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import join_names
from mtp.checkpoint.hub.resolve import snapshot_of


def missing_head_tensors(checkpoint: Checkpoint) -> str:
    """Return the missing tensors of the head, for use in a sentence."""
    missing = checkpoint.mtp.missing
    return join_names(missing) if checkpoint.mtp.present else f"all {len(missing)} mtp.* tensors"


def repair_hint(checkpoint: Checkpoint, *, replace: bool) -> str:
    """Return how to get a working head: a command to copy, or the source of a complete checkpoint.

    `replace` is set for a head that is present but incomplete or wrong. The sentence has no full stop.
    """
    if checkpoint.layout == "raw":
        return "Download the checkpoint again, or use the one that Qwen publishes"
    path, copy = str(checkpoint.path), ""
    if not checkpoint.path.is_dir() or snapshot_of(checkpoint.path):
        # Files in the hub's cache must not be changed, so the head goes into a copy.
        repo, _ = snapshot_of(checkpoint.path) or (path, "")
        path, copy = "DIRECTORY", f"hf download {repo} --local-dir DIRECTORY, then "
    flag = " --replace" if replace else ""
    return f"Run {copy}mtp-coord add-mtp{flag} --mlx-path {path} --hf-path RAW-CHECKPOINT"
