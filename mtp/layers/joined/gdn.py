"""A GatedDeltaNet layer in few operations. In fp32 the bits are those of the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.joined.products import ColumnLinear, can_store_columns, gated_rows, scaled_rows
from mtp.layers.reference.gdn import GDNLayer

TAPS = 4
"""Inputs of the convolution that the layer requires."""

QK_EPS = 1e-6
"""Added to the sum of squares of q and k, as in mlx-lm."""


class JoinedGDNLayer(GDNLayer):
    """A layer whose input projections are one where their weights allow it. Between projections it computes in fp32."""

    kind = "joined"

    def __init__(self, layer: DecoderLayer, dtype: mx.Dtype, *, widen: bool) -> None:
        """Join the projections of `layer`. `dtype` is that of caches; `widen` allows weights of half precision."""
        super().__init__(layer)
        self.dtype = dtype
        net = self.net
        inputs = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a]
        joined = can_store_columns(inputs, widen=widen)
        self.inputs: list[Any] = [ColumnLinear.from_modules(inputs)] if joined else inputs
        sizes = (net.conv_dim, net.value_dim, net.num_v_heads)
        self._ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        if can_store_columns([net.out_proj], widen=widen):
            net["out_proj"] = ColumnLinear.from_modules([net.out_proj])
        taps = net.conv1d.weight[:, :, 0].astype(mx.float32)
        self._taps = [mx.contiguous(taps[:, tap]) for tap in range(TAPS)]
        scale = net.head_k_dim**-0.5
        self._eps = QK_EPS * scale**2
        heads = net.num_k_heads
        self._scales = mx.array([[scale**2]] * heads + [[scale]] * heads)
        self._norm = net.norm.weight.astype(mx.float32)
        mx.eval(self._taps, self._scales, self._norm)

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return qkv, z, b and a of `x [rows, hidden]`."""
        if len(self.inputs) > 1:
            qkv, z, b, a = (part(x) for part in self.inputs)
            return qkv, z, b, a
        y = self.inputs[0](x)
        first, second, third = self._ends
        return y[:, :first], y[:, first:second], y[:, second:third], y[:, third:]

    def _convolve(self, conv_input: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return q, k and v `[n, w, heads, dim]` of `conv_input [n, w + 3, channels]`, q and k normalized."""
        net, width = self.net, conv_input.shape[1] - TAPS + 1
        parts = [conv_input[:, tap : tap + width] for tap in range(TAPS)]
        mixed = _convolved(*parts, *self._taps)
        shape = (*mixed.shape[:2], -1, net.head_k_dim)
        qk = scaled_rows(mixed[..., : 2 * net.key_dim].reshape(shape), self._scales, self._eps)
        v = mixed[..., 2 * net.key_dim :].reshape(*shape[:2], net.num_v_heads, net.head_v_dim)
        return qk[:, :, : net.num_k_heads], qk[:, :, net.num_k_heads :], v

    def _finish(self, out: mx.array, z: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the output projection of `out [rows, v_heads, v_dim]`, normalized and gated by `z`."""
        gate = z.astype(mx.float32).reshape(out.shape)
        gated = gated_rows(out, gate, self._norm, self.net.norm.eps)
        y: mx.array = self.net.out_proj(gated.reshape(z.shape).astype(dtype))
        return y


@partial(mx.compile, shapeless=True)
def _convolved(
    a: mx.array, b: mx.array, c: mx.array, d: mx.array,
    a_tap: mx.array, b_tap: mx.array, c_tap: mx.array, d_tap: mx.array,
) -> mx.array:  # fmt: skip
    """Return the silu of a depthwise convolution, from the inputs at each tap."""
    y = a * a_tap + b * b_tap + c * c_tap + d * d_tap
    return y * mx.sigmoid(y)
