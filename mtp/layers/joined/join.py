"""The replacement of reference layers by joined ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.joined.attention import JoinedAttentionLayer, can_join_attention
from mtp.layers.joined.gdn import TAPS, JoinedGDNLayer
from mtp.layers.joined.products import (
    ColumnLinear,
    JoinedMLP,
    RowNorm,
    can_join_mlp,
    can_store_columns,
)
from mtp.layers.layer import Layer, PlainMLP
from mtp.layers.reference import ReferenceLayer

WIDENED_BYTES = 512 * 10**6
"""Bytes. Largest checkpoint whose half-precision weights become fp32, which doubles their memory.

The plan counts them as stored, so a worker may take this much more than planned. `--dtype float32` widens every
checkpoint.
"""


class Joiner:
    """The parts of a stage in few operations. `dtype` is the type of caches."""

    def __init__(self, dtype: mx.Dtype, model_bytes: int) -> None:
        """Choose whether half-precision weights become fp32 by the bytes of the whole checkpoint."""
        self._dtype = dtype
        self._widen = model_bytes <= WIDENED_BYTES

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` joined where its weights allow it."""
        module: Any = layer.module
        for name in ("input_layernorm", "post_attention_layernorm"):
            module[name] = self.norm(module[name], wide=self._widen)
        module.mlp = self._joined_products(module.mlp)
        if module.is_linear:
            net = module.linear_attn
            if net.conv_kernel_size == TAPS and "bias" not in net.conv1d:
                return JoinedGDNLayer(module, self._dtype, widen=self._widen)
        elif can_join_attention(module.self_attn, widen=self._widen):
            return JoinedAttentionLayer(module, self._dtype)
        layer.norm, layer.mlp_norm = module.input_layernorm, module.post_attention_layernorm
        layer.mlp = PlainMLP(module.mlp)
        return layer

    def projection(self, module: Any) -> Any:
        """Return a linear layer stored by columns, or `module` itself."""
        if can_store_columns([module], widen=self._widen):
            return ColumnLinear.from_modules([module])
        return module

    def norm(self, norm: nn.RMSNorm, *, wide: bool = False) -> RowNorm:
        """Return a norm in few operations, with outputs in fp32 if `wide`."""
        return RowNorm(norm, wide=wide)

    def _joined_products(self, module: Any) -> Any:
        """Return `module` with dense MLPs joined and other linear layers stored by columns."""
        if can_join_mlp(module, widen=self._widen):
            return JoinedMLP(module)
        for name, child in module.children().items():
            if type(child) is nn.Linear:
                module[name] = self.projection(child)
            elif isinstance(child, nn.Module):
                module[name] = self._joined_products(child)
        return module
