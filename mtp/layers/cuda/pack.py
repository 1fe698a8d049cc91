"""The replacement of reference layers by those that run this project's CUDA kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import mlx.core as mx

from mtp.layers.cuda.attention import PackedAttentionLayer, can_pack_attention
from mtp.layers.cuda.gdn import PackedGDNLayer, gated_delta_window
from mtp.layers.cuda.packed_linear import PackedEmbedding, PackedLinear, can_pack, fused, multiply_rows, pack, pack_mlp
from mtp.layers.experts import fuse_experts, row_experts
from mtp.layers.gdn_windows import WindowMixer, has_window_kernel, recurrence_of
from mtp.layers.layer import KVFormat, Layer, Mixer, PlainMLP
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.gdn import GatedDelta
from mtp.layers.source_kernel import HALF_TYPES, CudaKernel, report_fallback


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
                packed = PackedGDNLayer(module, self._dtype, mlp, exact=self._exact)
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
