"""Replacement of a stage's layers by those that run this project's CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mtp.head.attention import KVFormat
from mtp.head.packed_attention import PackedAttention, can_pack_attention
from mtp.kernels.cuda import HALF_TYPES, backend, report_fallback
from mtp.kernels.gated_delta import HEAD_DIM, TAPS, GatedDeltaShape, gated_delta_window
from mtp.kernels.packed_linear import (
    PackedEmbedding,
    PackedLinear,
    can_pack,
    multiply_rows,
    pack,
    unpack,
)
from mtp.kernels.projections import pack_mlp
from mtp.kernels.row_attention import SLOTS, attend_rows, prepare_rows
from worker.model.loader import StageModules
from worker.model.packed_gdn import PackedGDN, can_pack_gdn


def pack_stage(modules: StageModules, kv_format: KVFormat) -> None:
    """Replace the parts of `modules` that the kernels compute. Do nothing on other backends.

    A part whose kernel fails to compile stays as it is.
    """
    dtype: mx.Dtype = modules.layers[0].input_layernorm.weight.dtype
    if backend() != "cuda" or dtype not in HALF_TYPES:
        return
    if not _works("packed_linear", lambda: _try_linear(dtype)):
        return
    head = [] if modules.head is None else modules.head.layers
    trials: dict[str, bool] = {}
    for layer in [*modules.layers, *head]:
        _pack_layer(layer, dtype, kv_format, trials)
        mx.clear_cache()
    if modules.lm_head is not None and can_pack([modules.lm_head]):
        modules.lm_head = PackedLinear.from_modules([modules.lm_head])
    elif modules.norm is not None and modules.lm_head is None:
        embedding = modules.embed_tokens
        if embedding is not None and can_pack([embedding]):
            modules.embed_tokens = PackedEmbedding.from_modules([embedding])
    mx.clear_cache()


def _pack_layer(layer: Any, dtype: mx.Dtype, kv_format: KVFormat, trials: dict[str, bool]) -> None:
    layer.mlp = pack_mlp(layer.mlp)
    if layer.is_linear and can_pack_gdn(layer.linear_attn, dtype):
        shape = GatedDeltaShape(layer.linear_attn.num_k_heads, layer.linear_attn.num_v_heads)
        if "gdn" not in trials:
            trials["gdn"] = _works("gated_delta_window", lambda: _try_gdn(shape, dtype))
        if trials["gdn"]:
            layer.linear_attn = PackedGDN(layer.linear_attn, dtype)
    elif (
        not layer.is_linear
        and kv_format.bits is None
        and can_pack_attention(layer.self_attn, dtype)
    ):
        attention = layer.self_attn
        if "attention" not in trials:
            trials["attention"] = _works("row_attention", lambda: _try_attention(attention, dtype))
        if trials["attention"]:
            layer.self_attn = PackedAttention(attention)


def _works(kernel: str, trial: Callable[[], Any]) -> bool:
    """Return whether `trial` runs, after logging once why it does not."""
    try:
        mx.eval(trial())
    except Exception as error:  # whatever the compiler of a machine finds wrong
        report_fallback(kernel, f"{type(error).__name__}: {error}"[:500])
        return False
    return True


def _try_linear(dtype: mx.Dtype) -> list[mx.array]:
    """Return results of every variant of the kernel that decoding uses."""
    factors = mx.ones((32, 1), dtype)
    w, packed = pack(mx.zeros((32, 8), mx.uint32), factors, factors)
    x = mx.zeros((1, 64), dtype)
    tokens = mx.zeros((1,), mx.int32)
    return [
        multiply_rows(x, w, packed),
        multiply_rows(x, w, packed, swiglu=True),
        multiply_rows(x, w, packed, residual=mx.zeros((1, 32), dtype)),
        unpack(w, packed, dtype),
        unpack(w, packed, dtype, tokens),
    ]


def _try_gdn(shape: GatedDeltaShape, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    rows = mx.zeros((1, shape.row), dtype)
    heads = mx.zeros((shape.value_heads,))
    constants = (
        mx.zeros((shape.channels, TAPS), dtype),
        heads,
        heads,
        mx.zeros((HEAD_DIM,), dtype),
        mx.array([1e-6]),
    )
    return gated_delta_window(
        shape,
        rows,
        rows,
        mx.zeros((1, TAPS - 1, shape.channels), dtype),
        mx.zeros((1, shape.value_heads, HEAD_DIM, HEAD_DIM)),
        mx.array([[0, 0, 0, 0, 1, 1]], dtype=mx.int32),
        constants,
    )


def _try_attention(attention: Any, dtype: mx.Dtype) -> list[mx.array]:
    shape = PackedAttention.shape_of(attention)
    constants = PackedAttention.constants_of(attention)
    width = (2 * shape.query_heads + 2 * shape.kv_heads) * attention.head_dim
    x = mx.zeros((1, width), dtype)
    places = mx.zeros((1, 2), mx.int32)
    caps = mx.array([256] * SLOTS, dtype=mx.int32)
    held = [mx.zeros((1, shape.kv_heads, 256, attention.head_dim), dtype)]
    q, k, v = prepare_rows(shape, x, places, constants)
    scale = mx.array([attention.scale])
    outputs = [attend_rows(shape, q, x, places, caps, scale, held * n, held * n) for n in (1, 2)]
    return [*outputs, k, v]
