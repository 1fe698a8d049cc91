"""Small checkpoints in the formats of other programs, written with plain arithmetic.

The layouts are those that `tests/support/packed` has from the programs themselves; the decoders are tested there. A
checkpoint here has the tensor names and the config of a published one.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.checkpoint.convert.foreign import PackedSource, open_source, read_source_part
from mtp.checkpoint.families.parameters import stack
from tests.support.checkpoints.checkpoints import read_tensors, write_checkpoint

Members = dict[str, tuple[str, mx.array]]
"""Stored type and tensor by the last part of a name."""

Pack = Callable[[mx.array], Members]

GROUP = 32

_PACKED = re.compile(r".*(_proj|linear_attn\.in_proj_(qkv|z)|mtp\.fc)\.weight")
"""The tensors that exporters quantize: projections, with experts one by one, but neither routers nor the embedding."""

TYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int64: "I64",
    mx.int32: "I32",
    mx.int8: "I8",
    mx.uint8: "U8",
}


def fp8_tensor(weight: mx.array) -> Members:
    """Pack as ModelOpt's FP8: one scale per tensor, and a scale of the activations."""
    scale = mx.abs(weight).max() / 448
    packed = mx.to_fp8(weight / scale)
    return {
        "weight": ("F8_E4M3", packed),
        "weight_scale": ("F32", scale),
        "input_scale": ("F32", mx.array(0.5)),
    }


def fp8_blocks(weight: mx.array) -> Members:
    """Pack as Qwen's FP8, in blocks of 32 by 64."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, (32, 64), strict=True))
    padded = mx.pad(weight, [(0, rows * 32 - weight.shape[0]), (0, columns * 64 - weight.shape[1])])
    scale = mx.abs(padded.reshape(rows, 32, columns, 64)).max(axis=(1, 3)) / 448
    wide = mx.repeat(mx.repeat(scale, 32, 0), 64, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": ("F8_E4M3", mx.to_fp8(weight / wide)), "weight_scale_inv": ("F32", scale)}


def nvfp4(weight: mx.array) -> Members:
    """Pack as ModelOpt's NVFP4."""
    codes, scale, double = _nvfp4(weight)
    return {
        "weight": ("U8", codes),
        "weight_scale": ("F8_E4M3", scale),
        "weight_scale_2": ("F32", double),
        "input_scale": ("F32", mx.array(0.5)),
    }


def nvfp4_divided(weight: mx.array) -> Members:
    """Pack as compressed-tensors' NVFP4."""
    codes, scale, double = _nvfp4(weight)
    return {
        "weight_packed": ("U8", codes),
        "weight_scale": ("F8_E4M3", scale),
        "weight_global_scale": ("F32", (1 / double).reshape(1)),
        "input_global_scale": ("F32", mx.array([2.0])),
    }


def gptq(*, symmetric: bool = True, less: int = 1) -> Pack:
    """Return the packer of GPTQ in 4 bits; `less` is subtracted from zero points, 1 in the first layout."""

    def pack(weight: mx.array) -> Members:
        codes, scale, zeros = _integers(weight, symmetric)
        groups = mx.arange(weight.shape[1], dtype=mx.int32) // GROUP
        return {
            "qweight": ("I32", pack_words(codes).T),
            "qzeros": ("I32", pack_words((zeros - less).T % 16)),
            "scales": ("F16", scale.T.astype(mx.float16)),
            "g_idx": ("I32", groups),
        }

    return pack


def pack_words(codes: mx.array) -> mx.array:
    """Return words of eight adjacent `codes` of 4 bits, the first in the lowest bits."""
    parts = codes.astype(mx.uint32).reshape(codes.shape[0], -1, 8)
    return mx.sum(parts << mx.arange(0, 32, 4, dtype=mx.uint32), axis=-1).view(mx.int32)


def _nvfp4(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    double = mx.abs(weight).max() / (6 * 448)
    codes, scale, *_ = mx.quantize(weight / double, mode="nvfp4")
    return codes.view(mx.uint8), scale, double


def _integers(weight: mx.array, symmetric: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Return codes of 4 bits, and scales and zero points per group of 32."""
    parts = weight.reshape(weight.shape[0], -1, GROUP)
    if symmetric:
        scale = mx.abs(parts).max(axis=2) * 2 / 15
        zeros = mx.full(scale.shape, 8)
    else:
        low, high = mx.minimum(parts.min(axis=2), 0), mx.maximum(parts.max(axis=2), 0)
        scale = (high - low) / 15
        zeros = mx.round(-low / scale)
    codes = mx.clip(mx.round(parts / scale[..., None] + zeros[..., None]), 0, 15)
    return codes.reshape(weight.shape), scale, zeros.astype(mx.int32)


FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "FP8 per tensor": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "FP8 in blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 64]}),
    "NVFP4 of ModelOpt": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "NVFP4 of compressed-tensors": (nvfp4_divided, {"quant_method": "compressed-tensors"}),
    "GPTQ": (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "AutoRound": (
        gptq(symmetric=False, less=0),
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
    ),
}
"""The packer and the quantization_config of each format."""


def write_foreign(path: Path, form: str, **options: Any) -> Path:
    """Write a small raw checkpoint into `path` whose projections have the format `form`. Return `path`.

    Experts are stored one by one. `options` are those of `write_checkpoint`.
    """
    pack, quantization = FORMATS[form]
    defaults: dict[str, Any] = {"fused_experts": False, "dtype": mx.float16, "layers": 4}
    options = defaults | options
    write_checkpoint(path, **options)
    stored: Members = {}
    for name, weight in read_tensors(path).items():
        if not _PACKED.fullmatch(name) or weight.ndim != 2 or weight.shape[0] % 8:
            stored[name] = (TYPES[weight.dtype], weight)
            continue
        for leaf, tensor in pack(weight.astype(mx.float32)).items():
            stored[f"{name.removesuffix('weight')}{leaf}"] = tensor
    save_tensors(path / "model.safetensors", stored)
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantization}))
    return path


def write_dequantized(source: Path, path: Path) -> Path:
    """Write the checkpoint of `source` into `path` with all weights in float32, and without a quantization."""
    path.mkdir()
    checkpoint = open_source(source)
    tensors = read_tensors(source)
    plain: dict[str, mx.array] = {}
    for part, plan in checkpoint.plans.items():
        weights, _ = read_source_part(checkpoint, part, mx.float32)
        for within, made in plan.items():
            if isinstance(made, PackedSource):
                values = weights[within]
                each = list(values) if made.transform is stack else [values]
                for name, weight in zip(made.stored, each, strict=True):
                    plain[f"{name.rpartition('.')[0]}.weight"] = weight
            else:
                plain |= {name: tensors[name] for name in made.stored}
    mx.save_safetensors(str(path / "model.safetensors"), plain, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_tensors(file: Path, tensors: Members) -> None:
    """Write a safetensors file with types that MLX cannot write, such as FP8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = []
    start = 0
    for name, (dtype, tensor) in tensors.items():
        flat = mx.contiguous(tensor).reshape(-1)
        content = np.array(flat.view(mx.uint8)).tobytes()
        end = start + len(content)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        data.append(content)
        start = end
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
