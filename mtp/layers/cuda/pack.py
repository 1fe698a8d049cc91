"""The replacement of reference layers by those that run this project's CUDA kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import mlx.core as mx

from mtp.layers.cuda.attention import PackedAttentionLayer, can_pack_attention
from mtp.layers.cuda.packed_linear import (
    PackedEmbedding,
    PackedEnds,
    PackedLinear,
    PackedMLP,
    can_pack,
    fused,
    multiply_rows,
    pack,
    pack_mlp,
)
from mtp.layers.experts import fuse_experts, row_experts
from mtp.layers.gdn_windows import WindowMixer, has_window_kernel, recurrence_of, window_kernel
from mtp.layers.layer import KVFormat, Layer, Mixer, PlainMLP
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.gdn import GatedDelta
from mtp.layers.source_kernel import HALF_TYPES, CudaKernel, report_fallback
from mtp.layers.window_layer import EndArguments, WindowLayer

gated_delta_window = window_kernel(CudaKernel)


def packed_windows(module: Any, dtype: mx.Dtype, mlp: PackedMLP | None, *, exact: bool = False) -> WindowLayer:
    """Return a GatedDeltaNet layer packed for activations of `dtype`, with its MLP packed or as it is."""
    net, norm = module.linear_attn, module.input_layernorm
    inputs = fused([net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a], padded=True, exact=exact)
    out = fused([net.out_proj], exact=exact)
    few = None
    if inputs.weights and out.weights:
        after = (out.weights, () if mlp is None else mlp.weights(module.post_attention_layernorm))
        few = EndArguments((norm.weight, inputs.weights), after, has_mlp=mlp is not None)
    many = EndArguments((norm.weight, inputs), (out, ()), has_mlp=False)
    recurrence = recurrence_of(gated_delta_window, net, dtype)
    own_mlp = mlp or PlainMLP(module.mlp)
    return WindowLayer("packed", module, recurrence, dtype, own_mlp, PackedEnds(norm.eps), few, many, (inputs, out))


class Packer:
    """The parts of a stage that the kernels compute."""

    def __init__(self, dtype: mx.Dtype, kv_format: KVFormat, *, exact: bool = False) -> None:
        """Pack for activations of `dtype`. Exact mode has products of its own for experts."""
        self._dtype, self._kv_format, self._exact = dtype, kv_format, exact

    def works(self) -> bool:
        """Return whether kernels compile here for the type of the activations. The log says why they do not."""
        if self._dtype not in HALF_TYPES:
            return False
        factors = mx.ones((32, 1), self._dtype)
        w, packed = pack(mx.zeros((32, 8), mx.uint32), factors, factors)
        try:
            mx.eval(multiply_rows(mx.zeros((1, 64), self._dtype), w, packed))
        except Exception as error:  # whatever the compiler of a machine finds wrong
            report_fallback("packed_multiply", str(error)[:500])
            return False
        return True

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` packed, or itself where no kernel computes it."""
        module: Any = layer.module
        if not self._exact:
            fused_experts = fuse_experts(module.mlp)
            module.mlp = row_experts(fused_experts, self._dtype, CudaKernel, self.picks)
        mlp = pack_mlp(module.mlp, exact=self._exact)
        packed: Layer | None = None
        if module.is_linear:
            if has_window_kernel(module.linear_attn):
                packed = packed_windows(module, self._dtype, mlp, exact=self._exact)
        elif self._kv_format.bits is None and can_pack_attention(module.self_attn, self._dtype):
            packed = PackedAttentionLayer(module, mlp, exact=self._exact)
        if packed is None:
            layer.mlp = mlp or PlainMLP(module.mlp)
        mx.clear_cache()
        return packed or layer

    def mixer(self, inner: Any) -> Mixer:
        """Return `inner` with the kernels or with fused products, or itself where they do not compute it."""
        if not isinstance(inner, GatedDelta):
            return cast(Mixer, inner.fuse(partial(fused, padded=True)))
        net: Any = inner.net
        if not has_window_kernel(net):
            return inner
        recurrence = recurrence_of(gated_delta_window, net, self._dtype, silu=inner.silu)
        inputs = inner.input_product(partial(fused, padded=True))
        return WindowMixer(recurrence, self._dtype, inputs, fused([net.out_proj]))

    def projection(self, module: Any) -> Any:
        """Return an lm_head packed, or itself."""
        return PackedLinear.from_modules([module]) if can_pack([module]) else module

    def embedding(self, module: Any) -> Any:
        """Return a tied embedding packed, or itself."""
        return PackedEmbedding.from_modules([module]) if can_pack([module]) else module

    @staticmethod
    def picks(*_: object) -> bool:
        """Use every kernel, as all are faster on NVIDIA GPUs: see `Picks`."""
        return True
