"""Layers that take few operations, for MLX's CPU backend on Linux, and the replacement of reference layers by them.

In fp32 the bits are those of the reference. Weights are stored by columns in fp32. MLX calls the reference BLAS there.
Its product with weights `[inputs, outputs]` runs along the outputs and is vectorized. The product with
`[outputs, inputs]` adds one number after another. Both add the inputs in the same order, so the bits are equal. One row
takes .55 of the time of fp32 weights by rows, and .46 of that of bf16 weights.

This backend runs `mx.fast.rms_norm` as about twelve operations of 2 to 3 us each. Here `mx.compile` joins them to
three, if the machine has a C++ compiler. Without one MLX runs them one by one, as before. The arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import Hole, Layer, PlainMLP
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.attention import AttentionLayer, Projected
from mtp.layers.reference.gdn import GDNLayer
from mtp.layers.rope import rotate, rotation_table


class ColumnLinear(nn.Module):
    """A linear layer with fp32 weights `[inputs, outputs]`. Its output has the type of its input."""

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        super().__init__()
        self.weight = weight
        if bias is not None:
            self.bias = bias

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Linear]) -> ColumnLinear:
        """Return `modules` as one layer, whose outputs follow each other. They lose their weights."""
        weight = _columns([module.weight for module in modules])
        bias = mx.concatenate([m.bias for m in modules]) if "bias" in modules[0] else None
        mx.eval(weight, bias)
        for module in modules:
            del module.weight
        return cls(weight, bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x [rows, inputs]` times the weights: `[rows, outputs]`."""
        y = x.astype(mx.float32) @ self.weight
        if "bias" in self:
            y = y + self.bias
        return y.astype(x.dtype)


def can_store_columns(modules: Sequence[Any], *, widen: bool) -> bool:
    """Return whether `modules` are linear layers that become one `ColumnLinear`. `widen` allows half precision."""
    return all(
        type(module) is nn.Linear
        and ("bias" in module) == ("bias" in modules[0])
        and (widen or module.weight.dtype == mx.float32)
        for module in modules
    )


def _columns(weights: Sequence[mx.array]) -> mx.array:
    rows = weights[0] if len(weights) == 1 else mx.concatenate(list(weights))
    return mx.contiguous(rows.astype(mx.float32).T)


@partial(mx.compile, shapeless=True)
def _scaled(x: mx.array, weight: mx.array, inverse: mx.array, eps: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    mean = mx.square(wide).sum(axis=-1, keepdims=True) * inverse
    return (wide * mx.rsqrt(mean + eps)).astype(weight.dtype) * weight


@partial(mx.compile, shapeless=True)
def _gated(
    x: mx.array, gate: mx.array, weight: mx.array, inverse: mx.array, eps: mx.array
) -> mx.array:
    mean = mx.square(x).sum(axis=-1, keepdims=True) * inverse
    return gate * mx.sigmoid(gate) * (x * mx.rsqrt(mean + eps) * weight)


@lru_cache(maxsize=64)
def constants(width: int, eps: float) -> tuple[mx.array, mx.array]:
    """Return what the norms take besides their inputs: the inverse of `width`, and `eps`."""
    found = mx.array(1 / width), mx.array(eps)
    mx.eval(found)
    return found


def scaled_rows(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return `x` over the root of the mean square of its last axis, times `weight`, in the type of `weight`."""
    return _scaled(x, weight, *constants(x.shape[-1], eps))


class RowNorm(nn.Module):
    """An RMSNorm. With `wide` its output is fp32, otherwise of the type of its weights."""

    def __init__(self, norm: nn.RMSNorm, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps
        self._scale = norm.weight.astype(mx.float32) if wide else norm.weight
        self._constants = constants(norm.weight.shape[0], norm.eps)
        mx.eval(self._scale)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the norm of the rows of `x`."""
        return _scaled(x, self._scale, *self._constants)


class FusedMLP(nn.Module):
    """A gated MLP whose gate and up projections are one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_up = ColumnLinear.from_modules([mlp.gate_proj, mlp.up_proj])
        self.down = ColumnLinear.from_modules([mlp.down_proj])
        self._half = self.gate_up.weight.shape[1] // 2

    def __call__(self, x: mx.array) -> mx.array:
        """Return the MLP of `x [rows, hidden]`."""
        y = self.gate_up(x)
        return self.down(swiglu(y[..., : self._half], y[..., self._half :]))


def can_join_attention(attention: Qwen3NextAttention, *, widen: bool) -> bool:
    """Return whether `FusedAttentionLayer` computes the layer."""
    rope = attention.rope
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    return (
        can_store_columns(inputs, widen=widen)
        and can_store_columns([attention.o_proj], widen=widen)
        and type(rope) is nn.RoPE
        and not rope.traditional
        and attention.q_norm.eps == attention.k_norm.eps
    )


class FusedAttention(nn.Module):
    """The products of an attention layer whose query, key, value and gate projections are one.

    Keys, values and queries have `dtype`, so that caches have the type of the checkpoint. The rest is fp32.
    """

    def __init__(self, attention: Qwen3NextAttention, dtype: mx.Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.rope = attention.rope
        self.scale = attention.scale
        self.heads = attention.num_attention_heads
        self.kv_heads = attention.num_key_value_heads
        dim = attention.head_dim
        q, gates = _without_gates(attention.q_proj, self.heads, dim)
        self.inputs = ColumnLinear.from_modules([q, attention.k_proj, attention.v_proj, gates])
        self.o_proj = ColumnLinear.from_modules([attention.o_proj])
        norms = [attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.kv_heads
        self._scales = mx.stack(norms).astype(mx.float32)
        self._eps = attention.q_norm.eps
        turned = self.heads + self.kv_heads
        self._ends = [turned * dim, (turned + self.kv_heads) * dim]
        self._dim = dim
        mx.eval(self._scales)
        del attention.q_proj.weight

    def project(
        self, x: mx.array, rotations: mx.array
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return queries, keys, values `[rows, heads, dim]` and gates `[rows, heads * dim]` of `x [rows, hidden]`.

        Queries and keys are normalized and turned. `rotations` are those of the rows, from `rotations_of`.
        """
        y = self.inputs(x)
        first, second = self._ends
        rows = x.shape[0]
        qk = scaled_rows(y[:, :first].reshape(rows, -1, self._dim), self._scales, self._eps)
        qk = rotate(qk, rotations).astype(self.dtype)
        values = y[:, first:second].reshape(rows, -1, self._dim).astype(self.dtype)
        return qk[:, : self.heads], qk[:, self.heads :], values, y[:, second:]


class FusedAttentionLayer(AttentionLayer):
    """An attention layer whose projections are one. RoPE rotates all rows of a frame at once."""

    kind = "fused"

    def __init__(self, layer: DecoderLayer, dtype: mx.Dtype) -> None:
        super().__init__(layer)
        self.attention = FusedAttention(layer.self_attn, dtype)

    def _project(
        self, x: mx.array, caches: Sequence[KVRows], widths: Sequence[int], holes: Sequence[Hole]
    ) -> Projected:
        """Return the projections of the norm of `x [rows, hidden]`, queries and keys normalized and turned."""
        moved = mx.concatenate([hole.count for hole in holes]) if holes else None
        projected: Projected = self.attention.project(
            self.norm(x), rotations_of(self.attention.rope, caches, widths, moved)
        )
        return projected

    def _turned(
        self, q: mx.array, k: mx.array, caches: Sequence[KVRows], holes: Sequence[Hole]
    ) -> tuple[mx.array, mx.array]:
        """Return `q` and `k`, which are turned already."""
        return q, k


def _without_gates(projection: nn.Linear, heads: int, dim: int) -> tuple[nn.Linear, nn.Linear]:
    """Return the projections of the queries and of the gates, which alternate head by head in `projection`."""
    parts = []
    for half in range(2):
        part = nn.Linear(1, 1, bias=False)
        part.weight = projection.weight.reshape(heads, 2, dim, -1)[:, half].reshape(heads * dim, -1)
        if "bias" in projection:
            part.bias = projection.bias.reshape(heads, 2, dim)[:, half].reshape(-1)
        parts.append(part)
    return parts[0], parts[1]


def rotations_of(
    rope: nn.RoPE, caches: Sequence[KVRows], widths: Sequence[int], moved: mx.array | None = None
) -> mx.array:
    """Return cosines and sines of rows, where sequence i owns `widths[i]` rows after those in `caches[i]`.

    With `moved`, int32 `[n]`, every sequence has one row, and row i is `moved[i]` positions earlier. Returns fp32
    `[rows, 2, half]`.
    """
    starts = [cache.position for cache in caches]
    end = max(start + width for start, width in zip(starts, widths, strict=True))
    table = rotation_table(rope, end)
    if moved is not None:
        return table[mx.array(starts, dtype=mx.int32) - moved]
    parts = []
    for cache, start, width in zip(caches, starts, widths, strict=True):
        image = cache.image_rotations(rope, width)
        parts.append(table[start : start + width] if image is None else image)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


TAPS = 4
"""Inputs of the convolution that `FusedGDNLayer` requires."""

QK_EPS = 1e-6
"""Added to the sum of squares of q and k, as in mlx-lm."""


class FusedGDNLayer(GDNLayer):
    """A layer whose input projections are one where their weights allow it. Between projections it computes in fp32."""

    kind = "fused"

    def __init__(self, layer: DecoderLayer, dtype: mx.Dtype, *, widen: bool) -> None:
        """Join the projections of `layer`. `dtype` is that of caches; `widen` allows weights of half precision."""
        super().__init__(layer)
        self.dtype = dtype
        net = self.net
        inputs = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a]
        fused = can_store_columns(inputs, widen=widen)
        self.inputs: list[Any] = [ColumnLinear.from_modules(inputs)] if fused else inputs
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
        gated = _gated(out, gate, self._norm, *constants(out.shape[-1], self.net.norm.eps))
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


WIDENED_BYTES = 512 * 10**6
"""Bytes. Largest checkpoint whose half-precision weights become fp32, which doubles their memory.

The plan counts them as stored, so a worker may take this much more than planned. `--dtype float32` widens every
checkpoint.
"""


class Fuser:
    """The parts of a stage in few operations. `dtype` is the type of caches."""

    def __init__(self, dtype: mx.Dtype, model_bytes: int) -> None:
        """Choose whether half-precision weights become fp32 by the bytes of the whole checkpoint."""
        self._dtype = dtype
        self._widen = model_bytes <= WIDENED_BYTES

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` fused where its weights allow it."""
        module: Any = layer.module
        for name in ("input_layernorm", "post_attention_layernorm"):
            module[name] = self.norm(module[name], wide=self._widen)
        module.mlp = self._joined_products(module.mlp)
        if module.is_linear:
            net = module.linear_attn
            if net.conv_kernel_size == TAPS and "bias" not in net.conv1d:
                return FusedGDNLayer(module, self._dtype, widen=self._widen)
        elif can_join_attention(module.self_attn, widen=self._widen):
            return FusedAttentionLayer(module, self._dtype)
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
        """Return `module` with dense MLPs fused and other linear layers stored by columns."""
        mlp = [module.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
        if can_store_columns(mlp, widen=self._widen):
            return FusedMLP(module)
        for name, child in module.children().items():
            if type(child) is nn.Linear:
                module[name] = self.projection(child)
            elif isinstance(child, nn.Module):
                module[name] = self._joined_products(child)
        return module
