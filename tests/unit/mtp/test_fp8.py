"""Block-wise FP8 checkpoints, as Qwen publishes them: conversion, the head, and the errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.convert.foreign import open_source
from proto.errors import CheckpointError
from tests.support.checkpoints.checkpoints import edit_config, read_tensors, write_checkpoint

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
safetensors = pytest.importorskip("safetensors.torch")

BLOCK = (32, 48)
"""Rows and columns per scale: not square, and no divisor of all shapes."""

FP8_MAX = 448.0
"""The largest value of the format E4M3."""


def in_fp8(name: str, weight: Any) -> bool:
    """Return whether Qwen's exporter stores this tensor as FP8: the projections, not the embedding and the routers."""
    return weight.ndim == 2 and "_proj" in name and name.endswith(".weight")


def per_block(values: Any, shape: tuple[int, ...]) -> Any:
    """Repeat each value over its block, cut to `shape`."""
    wide = values.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return wide[: shape[0], : shape[1]]


def quantize(weight: Any) -> tuple[Any, Any]:
    """Return the FP8 weight and its scales, one per block."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    padded = torch.zeros(rows * BLOCK[0], columns * BLOCK[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.reshape(rows, BLOCK[0], columns, BLOCK[1])
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / FP8_MAX
    return (weight.float() / per_block(scales, weight.shape)).to(torch.float8_e4m3fn), scales


def fp8_pair(path: Path, **options: Any) -> tuple[Path, Path]:
    """Write an FP8 checkpoint and the same one dequantized by torch. Return both."""
    source = write_checkpoint(path / "bf16", dtype=mx.bfloat16, layers=4, **options)
    packed: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, weight in safetensors.load_file(source / "model.safetensors").items():
        if in_fp8(name, weight):
            packed[name], scales = quantize(weight)
            packed[f"{name}_scale_inv"] = scales
            plain[name] = (packed[name].float() * per_block(scales, weight.shape)).bfloat16()
        else:
            packed[name] = plain[name] = weight
    for name, tensors in (("fp8", packed), ("plain", plain)):
        shutil.copytree(source, path / name)
        safetensors.save_file(tensors, path / name / "model.safetensors", {"format": "pt"})
    packing = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    edit_config(path / "fp8", lambda config: config.update(quantization_config=packing))
    return path / "fp8", path / "plain"


def converted(source: Path, out: Path, settings: Settings) -> dict[str, mx.array]:
    """Convert `source` and return the tensors of the result."""
    convert(open_source(source), out, settings)
    config = json.loads((out / "config.json").read_text())
    assert ("quantization_config" in config) == (settings.quantization is not None)
    return read_tensors(out)


@pytest.mark.parametrize(
    "options",
    [{}, {"moe": True, "fused_experts": False}, {"moe": True, "qwen3_next": True}],
    ids=["dense", "experts one by one", "Qwen3-Next"],
)
@pytest.mark.parametrize(
    "settings", [Settings(), Settings(Quantization.of(8, 32))], ids=["bfloat16", "8 bits"]
)
def test_a_conversion_equals_that_of_the_dequantized_weights(
    tmp_path: Path, options: dict[str, Any], settings: Settings
) -> None:
    """Every tensor has the bits of the conversion of the weights that torch dequantized, the head's included."""
    fp8, plain = fp8_pair(tmp_path, **options)
    ours = converted(fp8, tmp_path / "ours", settings)
    expected = converted(plain, tmp_path / "expected", settings)
    assert ours.keys() == expected.keys()
    assert any("mtp." in name for name in ours)
    assert [name for name in ours if not mx.array_equal(ours[name], expected[name])] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"weight_block_size": None}, "do not fit"), ({"weight_block_size": [64, 64]}, "do not fit")],
    ids=["no block", "another block"],
)
def test_a_wrong_block_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A block size that is missing or does not match the scales is an error, and nothing is converted."""
    fp8, _ = fp8_pair(tmp_path)
    edit_config(fp8, lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=message):
        convert(open_source(fp8), tmp_path / "out", Settings())
    assert not (tmp_path / "out" / "config.json").exists()
