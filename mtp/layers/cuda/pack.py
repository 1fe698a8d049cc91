"""The replacement of reference layers by those that run this project's CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mtp.layers.cuda.attention import PackedAttentionLayer, can_pack_attention, shape_of
from mtp.layers.cuda.gdn import PackedGDNLayer, gated_delta_window
from mtp.layers.cuda.in_place_kv import write_rows
from mtp.layers.cuda.packed_linear import (
    PackedEmbedding,
    PackedLinear,
    can_pack,
    fused,
    multiply_rows,
    pack,
    pack_mlp,
    unpack,
)
from mtp.layers.cuda.row_attention import SLOTS, RowArrays, attend_rows, prepare_rows
from mtp.layers.experts import fuse_experts, row_experts
from mtp.layers.gated_delta import has_window_kernel, recurrence_of, window_constants
from mtp.layers.gdn_windows import HEAD_DIM, TAPS, GatedDeltaShape, WindowMixer
from mtp.layers.layer import KVFormat, Layer, Mixer, PlainMLP, Rows
from mtp.layers.prepare_rows import constants_of
from mtp.layers.reference import ReferenceLayer
from mtp.layers.source_kernel import HALF_TYPES, CudaKernel, report_fallback


class Packer:
    """The parts of a stage that the kernels compute. A part whose kernel fails to compile stays as it is."""

    def __init__(self, dtype: mx.Dtype, kv_format: KVFormat, *, exact: bool = False) -> None:
        """Pack for activations of `dtype`. Exact mode has products of its own for experts."""
        self._dtype, self._kv_format, self._exact = dtype, kv_format, exact
        self._trials: dict[str, bool] = {}

    @property
    def works(self) -> bool:
        """True if the kernel of the products compiles for the type of the activations."""
        return self._dtype in HALF_TYPES and self._tries(
            "packed_linear", lambda: _try_linear(self._dtype)
        )

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` packed, or itself where no kernel computes it."""
        module: Any = layer.module
        if not self._exact:
            fused_experts = fuse_experts(module.mlp)
            module.mlp = row_experts(fused_experts, self._dtype, CudaKernel, self.picks)
        mlp = pack_mlp(module.mlp)
        packed: Layer | None = None
        if module.is_linear:
            if self._has_window_kernel(module.linear_attn):
                packed = PackedGDNLayer(module, self._dtype, mlp)
        elif (
            self._kv_format.bits is None
            and can_pack_attention(module.self_attn, self._dtype)
            and self._tries("row_attention", lambda: _try_attention(module.self_attn, self._dtype))
        ):
            packed = PackedAttentionLayer(module, mlp)
        if packed is None:
            layer.mlp = mlp or PlainMLP(module.mlp)
        mx.clear_cache()
        return packed or layer

    def mixer(self, inner: Any) -> Mixer:
        """Return `inner`, a `GDNLayer.over` the modules, with the kernels, or itself where they do not compute it."""
        net: Any = inner.net
        if not self._has_window_kernel(net, silu=inner.silu):
            return cast(Mixer, inner)
        recurrence = recurrence_of(gated_delta_window, net, self._dtype, silu=inner.silu)
        inputs = fused([net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a], padded=True)
        return WindowMixer(recurrence, self._dtype, inputs, fused([net.out_proj]))

    def _has_window_kernel(self, net: Any, *, silu: bool = True) -> bool:
        trial = partial(_try_gdn, net, silu, self._dtype)
        return has_window_kernel(net) and self._tries("gated_delta_window", trial)

    def projection(self, module: Any) -> Any:
        """Return an lm_head packed, or itself."""
        return PackedLinear.from_modules([module]) if can_pack([module]) else module

    def embedding(self, module: Any) -> Any:
        """Return a tied embedding packed, or itself."""
        return PackedEmbedding.from_modules([module]) if can_pack([module]) else module

    def picks(
        self, kernel: str, shapes: str, source: str, width: int, own: Rows, replaced: Rows
    ) -> bool:
        """Return whether `kernel` compiles: see `Picks`. Here it wins wherever it does."""
        return self._tries(kernel, lambda: own(mx.zeros((1, width), self._dtype)))

    def _tries(self, kernel: str, trial: Callable[[], Any]) -> bool:
        """Return whether `trial` runs. It runs once for each kernel."""
        if kernel not in self._trials:
            self._trials[kernel] = _works(kernel, trial)
        return self._trials[kernel]


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


def _try_gdn(net: Any, silu: bool, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    shape = GatedDeltaShape(net.num_k_heads, net.num_v_heads, silu)
    rows = mx.zeros((1, shape.row), dtype)
    conv = mx.zeros((1, TAPS - 1, shape.channels), dtype)
    state = mx.zeros((1, shape.value_heads, HEAD_DIM, HEAD_DIM))
    spans = mx.array([[0, 0, 0, 0, 1, 1]], dtype=mx.int32)
    constants = window_constants(net, dtype)
    return gated_delta_window(shape, rows, rows, conv, state, spans, constants)


def _try_attention(attention: Any, dtype: mx.Dtype) -> list[mx.array]:
    shape = shape_of(attention)
    constants = constants_of(attention)
    width = (2 * shape.query_heads + 2 * shape.kv_heads) * attention.head_dim
    x = mx.zeros((1, width), dtype)
    at = RowArrays(
        mx.zeros((1, 2), mx.int32),
        mx.zeros((1, 3), mx.int32),
        mx.array([256] * SLOTS, dtype=mx.int32),
        mx.zeros((1,), mx.int32),
    )
    pair = mx.zeros((2, shape.kv_heads, 256, attention.head_dim), dtype)
    q, new = prepare_rows(shape, x, at.places, constants)
    scale = mx.array([attention.scale])
    found = [new]
    for n in (1, 2):
        found.append(write_rows(new, at, [pair] * n, [at.written] * n))
        found.append(attend_rows(shape, q, x, at, scale, [pair] * n))
    return found
