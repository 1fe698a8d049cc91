"""Errors in a checkpoint's tensors are found before the tensors are read, and name the tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import CheckpointError
from proto.span import Span
from tests.support.checkpoints.checkpoints import Weights, edit_tensors, write_checkpoint
from worker.model.loader import StageModules, load_stage


def _damaged(
    path: Path, change: Callable[[Weights], object], **options: Any
) -> Callable[[], StageModules]:
    write_checkpoint(path, **options)
    edit_tensors(path, change, "pt" if options.get("layout", "raw") == "raw" else "mlx")
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
            r"model\.safetensors: tensor model\.language_model\.layers\.1\.mlp\.extra\.weight is not part",
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
            r"tensor embed_tokens\.weight is missing. Download",
        ),
    ],
    ids=["missing", "extra", "shape", "scales", "layer", "head shape", "embedding"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[Weights], object], message: str
) -> None:
    """A missing, extra or misshapen tensor is named, with its file if it has one."""
    load = _damaged(tmp_path, change, layers=4)
    with pytest.raises(CheckpointError, match=message):
        load()


_INTEGERS = {"I8": mx.int8, "I64": mx.int64, "U32": mx.uint32, "F8_E4M3": mx.uint8, "F64": mx.int64}
"""Types that floats are not stored in, each with an integer type of equal size."""


@pytest.mark.parametrize("stored", _INTEGERS)
def test_a_float_of_an_impossible_type_is_named(tmp_path: Path, stored: str) -> None:
    """A float tensor stored in an impossible type is refused with file, tensor, type and advice.

    Without the check it would load and the model would print nonsense.
    """
    name = f"{_LAYER}mlp.up_proj.weight"
    wrong = mx.zeros((128, 64), _INTEGERS[stored])
    load = _damaged(tmp_path, lambda w: w.update({name: wrong}), layers=4)
    _relabel(tmp_path / "model.safetensors", name, stored)
    words = rf"model\.safetensors: tensor {re.escape(name)} is stored as {stored}; .*BF16 is needed. Use the"
    with pytest.raises(CheckpointError, match=words):
        load()


def _relabel(file: Path, tensor: str, dtype: str) -> None:
    """Replace a tensor's type in the file header by another type of equal size."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[tensor]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_packed_weight_is_in_words(tmp_path: Path) -> None:
    """A packed weight that is not stored as U32 is refused. Its bits would be misread."""
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    load = _damaged(
        tmp_path,
        lambda w: w.update({name: w[name].astype(mx.float32)}),
        layers=4,
        layout="mlx",
        quantize=4,
    )
    with pytest.raises(
        CheckpointError, match=rf"tensor {re.escape(name)} is stored as F32; U32 is needed"
    ):
        load()


def test_a_tensor_type_mlx_cannot_read_is_named(tmp_path: Path) -> None:
    """A type that MLX cannot read is named with its tensor and advice, since MLX then reads no tensor of the file."""
    name = "model.visual.patch_embed.proj.weight"
    wrong = mx.zeros((8, 3), mx.int64)
    load = _damaged(tmp_path, lambda w: w.update({name: wrong}), layers=4)
    _relabel(tmp_path / "model.safetensors", name, "F64")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: MLX cannot read model\.visual\.\S+: .*F64"
    ):
        load()


def test_tensors_missing_from_an_index(tmp_path: Path) -> None:
    """Tensors missing from an index are named and counted."""
    write_checkpoint(tmp_path, layers=4, shards=3, moe=True)
    index = tmp_path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    for name in [n for n in found["weight_map"] if n.startswith(f"{_LAYER}mlp.")]:
        file = tmp_path / found["weight_map"].pop(name)
        kept = mx.load(str(file))
        assert isinstance(kept, dict)
        mx.eval(kept)
        del kept[name]
        mx.save_safetensors(str(file), kept, {"format": "pt"})
    index.write_text(json.dumps(found))
    words = r": tensors layers\.1\.mlp\.\S+, .* and \d more are missing. Download the checkpoint"
    with pytest.raises(CheckpointError, match=words):
        load_stage(Checkpoint.open(tmp_path), Span(0, 4), first=True, last=True, dtype=None)


def test_errors_outside_the_span_are_ignored(tmp_path: Path) -> None:
    """Errors in layers outside the span are ignored, so that a partial copy can serve the span."""
    _damaged(tmp_path, lambda w: w.pop(f"{_LAYER}mlp.up_proj.weight"), layers=4)
    checkpoint = Checkpoint.open(tmp_path)
    assert load_stage(checkpoint, Span(2, 4), first=False, last=False, dtype=None).layers
