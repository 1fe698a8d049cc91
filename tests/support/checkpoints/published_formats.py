"""The formats in which people publish these models: the quantization of a config, and the header of one module."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtp.checkpoint.convert.foreign import plan_packed
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.shard import TensorInfo
from proto.errors import CheckpointError
from tests.support.checkpoints.published import MODELS

Verdict = Literal["served", "converted", "refused"]
Tensors = dict[str, tuple[str, tuple[int, ...]]]

_ROWS, _COLUMNS, _GROUP = 256, 512, 128
_BITS = {
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "I32": 32,
    "U32": 32,
}
_MODULE = "model.language_model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class PublishedFormat:
    """A row of the table of formats: the names of its publishers' tools, and the tensors of one linear layer."""

    name: str
    fields: dict[str, Any] = field(hash=False)
    tensors: Tensors = field(default_factory=dict, hash=False)

    def verdict(self) -> Verdict:
        """Return what the programs do with a checkpoint whose layer is stored so."""
        config = MODELS[0].config
        text = config["text_config"] | {"hidden_size": _COLUMNS, "intermediate_size": _ROWS}
        config |= {"text_config": text, **self.fields}
        try:
            parsed = ModelConfig.parse(Path("config.json"), config)
            infos = {f"{_MODULE}.{leaf}": _info(*kind) for leaf, kind in self.tensors.items()}
            checkpoint = plan_packed(Checkpoint.assemble(Path("model"), parsed, "raw", infos))
        except CheckpointError:
            return "refused"
        assert not checkpoint.unknown
        if parsed.foreign is None:
            return "served"
        assert list(checkpoint.plans["layers.0"]) == ["mlp.up_proj.weight"]
        return "converted"


def _info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    nbytes = math.prod(shape) * _BITS[dtype] // 8
    return TensorInfo(Path("model.safetensors"), dtype, shape, 0, nbytes)


def _of(method: str, **fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **fields}}


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return _of("compressed-tensors", config_groups={"group_0": group})


_FP8 = ("F8_E4M3", (_ROWS, _COLUMNS))
_NIBBLES = ("U8", (_ROWS, _COLUMNS // 2))
_BY_16 = ("F8_E4M3", (_ROWS, _COLUMNS // 16))
_ONE: tuple[str, tuple[int, ...]] = ("F32", (1,))
_GROUPS = _COLUMNS // _GROUP
_GPTQ: Tensors = {
    "qweight": ("I32", (_COLUMNS // 8, _ROWS)),
    "qzeros": ("I32", (_GROUPS, _ROWS // 8)),
    "scales": ("F16", (_GROUPS, _ROWS)),
    "g_idx": ("I32", (_COLUMNS,)),
}

FORMATS = (
    PublishedFormat("raw, BF16 or FP16", {}, {"weight": ("BF16", (_ROWS, _COLUMNS))}),
    PublishedFormat(
        "MLX's own: affine, MXFP4, MXFP8, NVFP4",
        {"quantization": {"group_size": 64, "bits": 4}},
        {
            "weight": ("U32", (_ROWS, _COLUMNS // 8)),
            "scales": ("BF16", (_ROWS, _COLUMNS // 64)),
            "biases": ("BF16", (_ROWS, _COLUMNS // 64)),
        },
    ),
    PublishedFormat(
        "FP8 by blocks of 128 x 128 (Qwen's `-FP8`)",
        _of("fp8", weight_block_size=[128, 128]),
        {"weight": _FP8, "weight_scale_inv": ("BF16", (_ROWS // 128, _COLUMNS // 128))},
    ),
    PublishedFormat(
        "FP8 by blocks, with scales that are powers of two in F32 (`ue8m0`)",
        _of("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0"),
        {"weight": _FP8, "weight_scale_inv": ("F32", (_ROWS // 128, _COLUMNS // 128))},
    ),
    PublishedFormat(
        "FP8 per row (compressed-tensors `FP8_DYNAMIC`)",
        _compressed(num_bits=8, type="float", strategy="channel"),
        {"weight": _FP8, "weight_scale": ("BF16", (_ROWS, 1))},
    ),
    PublishedFormat(
        "FP8 per tensor (compressed-tensors, ModelOpt)",
        _of("modelopt", quant_algo="FP8"),
        {"weight": _FP8, "weight_scale": _ONE},
    ),
    PublishedFormat(
        "NVFP4 (compressed-tensors)",
        _compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        {"weight_packed": _NIBBLES, "weight_scale": _BY_16, "weight_global_scale": _ONE},
    ),
    PublishedFormat(
        "NVFP4 (ModelOpt)",
        _of("modelopt", quant_algo="NVFP4", group_size=16),
        {"weight": _NIBBLES, "weight_scale": _BY_16, "weight_scale_2": _ONE},
    ),
    PublishedFormat(
        "MXFP4 (compressed-tensors)",
        _compressed(num_bits=4, type="float", strategy="group", group_size=32),
        {"weight_packed": _NIBBLES, "weight_scale": ("U8", (_ROWS, _COLUMNS // 32))},
    ),
    PublishedFormat(
        "W4A16 (compressed-tensors)",
        _compressed(num_bits=4, type="int", strategy="group", group_size=_GROUP),
        {
            "weight_packed": ("I32", (_ROWS, _COLUMNS // 8)),
            "weight_scale": ("BF16", (_ROWS, _GROUPS)),
            "weight_shape": ("I32", (2,)),
        },
    ),
    PublishedFormat(
        "AWQ, 4 bits",
        _of("awq", bits=4, group_size=_GROUP, zero_point=True, version="gemm"),
        {
            "qweight": ("I32", (_COLUMNS, _ROWS // 8)),
            "qzeros": ("I32", (_GROUPS, _ROWS // 8)),
            "scales": ("F16", (_GROUPS, _ROWS)),
        },
    ),
    PublishedFormat(
        "GPTQ, 4 and 8 bits, without `desc_act`",
        _of("gptq", bits=4, group_size=_GROUP, desc_act=False),
        _GPTQ,
    ),
    PublishedFormat(
        "AutoRound",
        _of("auto-round", bits=4, group_size=_GROUP, packing_format="auto_round:auto_gptq"),
        {name: kind for name, kind in _GPTQ.items() if name != "g_idx"},
    ),
    PublishedFormat("bitsandbytes", _of("bitsandbytes", load_in_4bit=True)),
    PublishedFormat("torchao", _of("torchao")),
    PublishedFormat("BitNet", _of("bitnet")),
)
