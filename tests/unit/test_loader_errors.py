"""What is wrong with a checkpoint's tensors is found before they are read, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mtp.checkpoint import Checkpoint
from proto.errors import CheckpointError, SpanError
from proto.span import Span
from tests.checkpoints import read_tensors, write_checkpoint
from tests.conftest import Checkpoints
from worker.model.loader import StageModules, load_stage

Weights = dict[str, mx.array]


def _damaged(
    path: Path, change: Callable[[Weights], object], **options: Any
) -> Callable[[], StageModules]:
    write_checkpoint(path, **options)
    weights = read_tensors(path)
    change(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    layers = Span(0, options.get("layers", 8))
    return lambda: load_stage(Checkpoint.open(path), layers, first=True, last=True, dtype=None)


_LAYER = "model.language_model.layers.1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop(f"{_LAYER}mlp.up_proj.weight"),
            r"tensor layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        (
            lambda w: w.update({f"{_LAYER}mlp.extra.weight": mx.zeros(3)}),
            r"model\.safetensors: tensor model\.language_model\.layers\.1\.mlp\.extra\.weight is not one",
        ),
        (
            lambda w: w.update({f"{_LAYER}mlp.up_proj.weight": mx.zeros((3, 64))}),
            r"model\.safetensors: .*layers\.1\.mlp\.up_proj\.weight.* \(3, 64\).*\(128, 64\)",
        ),
        (
            lambda w: w.update({f"{_LAYER}mlp.up_proj.scales": mx.zeros((128, 1))}),
            r"layers\.1\.mlp\.up_proj\.scales .*quantized",
        ),
        (
            lambda w: w.update({"model.language_model.layers.9.norm.weight": mx.zeros(3)}),
            r"layers\.9\.norm\.weight belongs to no part",
        ),
        (
            lambda w: w.update({"mtp.fc.weight": mx.zeros((64, 64))}),
            r"mtp\.fc\.weight.*\(64, 64\).*\(64, 128\)",
        ),
        (
            lambda w: w.pop("model.language_model.embed_tokens.weight"),
            r"embed_tokens\.weight is missing",
        ),
    ],
    ids=["missing", "extra", "shape", "scales", "layer", "head shape", "embedding"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[Weights], object], message: str
) -> None:
    """Missing, extra or misshapen: the tensor is named, and the file where there is one."""
    load = _damaged(tmp_path, change, layers=4)
    with pytest.raises(CheckpointError, match=message):
        load()


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """One expert of a stack stored one by one is not there: its own name is given."""
    gone = f"{_LAYER}mlp.experts.3.down_proj.weight"
    load = _damaged(tmp_path, lambda w: w.pop(gone), layers=4, moe=True, fused_experts=False)
    with pytest.raises(CheckpointError, match=gone.replace(".", r"\.")):
        load()


def test_a_wrong_tensor_outside_the_span_is_another_stage_s_business(tmp_path: Path) -> None:
    """A stage asks nothing of layers it does not hold, so that a partial copy can serve it."""
    _damaged(tmp_path, lambda w: w.pop(f"{_LAYER}mlp.up_proj.weight"), layers=4)
    checkpoint = Checkpoint.open(tmp_path)
    assert load_stage(checkpoint, Span(2, 4), first=False, last=False, dtype=None).layers


def test_layers_that_do_not_exist_are_refused(checkpoints: Checkpoints) -> None:
    """A span beyond the model names the layers there are."""
    with pytest.raises(SpanError, match="8 layers, 0-7"):
        load_stage(Checkpoint.open(checkpoints()), Span(4, 9), first=False, last=True, dtype=None)
