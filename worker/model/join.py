"""Replacement of a stage's layers by those that take few operations on MLX's CPU backend."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.exact.arithmetic import Arithmetic
from mtp.head.joined_attention import JoinedAttention, can_join_attention
from mtp.kernels.column_linear import ColumnLinear, can_store_columns
from mtp.kernels.joined_mlp import JoinedMLP, can_join_mlp
from mtp.kernels.row_norm import RowNorm
from worker.model.joined_gdn import JoinedGDN, can_join_gdn
from worker.model.loader import StageModules

WIDENED_BYTES = 512 * 10**6
"""Bytes. Largest checkpoint whose half-precision weights become fp32, which doubles their memory.

The plan counts them as stored, so a worker may take this much more than planned. `--dtype float32` widens every
checkpoint.
"""


def join_stage(modules: StageModules) -> None:
    """Replace the parts of `modules` that take fewer operations joined, for MLX's CPU backend.

    Do nothing on macOS, whose BLAS is another one, and on GPUs. A stage with `--exact` keeps its layers.
    """
    if Arithmetic.here().backend != "cpu" or sys.platform == "darwin":
        return
    dtype: mx.Dtype = modules.layers[0].input_layernorm.weight.dtype
    widen = modules.model_bytes <= WIDENED_BYTES
    for layer in modules.layers:
        _join_layer(layer, dtype, widen=widen)
    head = modules.head
    if head is not None:
        for layer in head.layers:
            _join_layer(layer, dtype, widen=widen)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            head[name] = _row_norm(head[name])
        head.fc = _by_columns(head.fc, widen=widen)
    if modules.norm is not None:
        modules.norm = _row_norm(modules.norm)
    if modules.lm_head is not None:
        modules.lm_head = _by_columns(modules.lm_head, widen=widen)
    mx.clear_cache()


def _join_layer(layer: Any, dtype: mx.Dtype, *, widen: bool) -> None:
    wide = widen and _is_dense(layer)
    for name in ("input_layernorm", "post_attention_layernorm"):
        layer[name] = _row_norm(layer[name], wide=wide)
    if layer.is_linear:
        if not isinstance(layer.linear_attn, JoinedGDN) and can_join_gdn(layer.linear_attn):
            layer.linear_attn = JoinedGDN(layer.linear_attn, widen=widen)
    elif not isinstance(layer.self_attn, JoinedAttention) and can_join_attention(
        layer.self_attn, widen=widen
    ):
        layer.self_attn = JoinedAttention(layer.self_attn, dtype)
    layer.mlp = _join_products(layer.mlp, widen=widen)


def _is_dense(layer: Any) -> bool:
    """Return whether all products of the layer can take fp32 rows."""
    return all(
        type(leaf) is nn.Linear
        for leaf in layer.leaf_modules()
        if isinstance(leaf, (nn.Linear, nn.QuantizedLinear))
    )


def _join_products(module: Any, *, widen: bool) -> Any:
    """Return `module` with dense MLPs joined and other linear layers stored by columns."""
    if can_join_mlp(module, widen=widen):
        return JoinedMLP(module)
    for name, child in module.children().items():
        if type(child) is nn.Linear:
            module[name] = _by_columns(child, widen=widen)
        elif isinstance(child, nn.Module):
            module[name] = _join_products(child, widen=widen)
    return module


def _by_columns(module: Any, *, widen: bool) -> Any:
    if can_store_columns([module], widen=widen):
        return ColumnLinear.from_modules([module])
    return module


def _row_norm(norm: Any, *, wide: bool = False) -> Any:
    return norm if isinstance(norm, RowNorm) else RowNorm(norm, wide=wide)
