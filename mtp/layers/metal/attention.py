"""Attention whose projections are one product, with everything around MLX's attention compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import Hole
from mtp.layers.metal.products import (
    COMPILED_ROWS,
    Format,
    JoinedLinear,
    JoinedMLP,
    Weights,
    gated_products,
)
from mtp.layers.reference.attention import AttentionLayer, Projected


@dataclass(frozen=True)
class _Shape:
    """The heads of a layer, the formats of its products and of its MLP, and the epsilons of its norms."""

    heads: int
    kv_heads: int
    dim: int
    products: Format
    out: Format
    mlp: tuple[Format, Format] | None
    eps: float
    head_eps: float


class JoinedAttentionLayer(AttentionLayer):
    """An attention layer in joined products."""

    kind = "joined"

    def __init__(
        self, layer: DecoderLayer, inputs: JoinedLinear, out: JoinedLinear, mlp: JoinedMLP | None
    ) -> None:
        super().__init__(layer)
        if mlp is not None:
            self.mlp = mlp
        attention = self.attention
        self._shape = _Shape(
            attention.num_attention_heads,
            attention.num_key_value_heads,
            attention.head_dim,
            inputs.format,
            out.format,
            mlp.formats if mlp else None,
            self.norm.eps,
            attention.q_norm.eps,
        )
        norms = self.norm.weight, attention.q_norm.weight, attention.k_norm.weight
        self._inputs = (inputs.weights, norms)
        self._outputs = (out.weights, self.mlp_norm.weight, mlp.weights if mlp else ())
        self._compiled = _compiled(self._shape)

    @classmethod
    def of(cls, layer: DecoderLayer, mlp: JoinedMLP | None) -> JoinedAttentionLayer | None:
        """Return `layer` joined, or None if its projections have different formats."""
        attention: Any = layer.self_attn
        if attention.q_norm.eps != attention.k_norm.eps or Format.of(attention.o_proj) is None:
            return None
        heads, dim = attention.num_attention_heads, attention.head_dim
        keys = 2 * attention.num_key_value_heads * dim
        # Queries and gates alternate head by head. Here the gates of all heads are last.
        alternating = mx.arange(2 * heads * dim).reshape(heads, 2, dim)
        order = [alternating[:, 0].flatten(), 2 * heads * dim + mx.arange(keys)]
        order.append(alternating[:, 1].flatten())
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        inputs = JoinedLinear.of(parts, mx.concatenate(order))
        out = JoinedLinear.of([attention.o_proj]) if inputs else None
        return None if inputs is None or out is None else cls(layer, inputs, out, mlp)

    def _project(
        self, x: mx.array, caches: Sequence[KVRows], widths: Sequence[int], holes: Sequence[Hole]
    ) -> Projected:
        """Return the projections of the norm of `x [rows, hidden]`, queries and keys normalized."""
        project = self._compiled[0] if x.shape[0] <= COMPILED_ROWS else _project
        projected: Projected = project(self._shape, x, *self._inputs)
        return projected

    def _finish(self, x: mx.array, merged: mx.array, gate: mx.array) -> mx.array:
        """Return `x [rows, hidden]` plus the projection of `merged`, gated, and then plus the MLP."""
        finish = self._compiled[1] if x.shape[0] <= COMPILED_ROWS else _finish
        y: mx.array = finish(self._shape, x, merged, gate, *self._outputs)
        return y if self._shape.mlp else self.mlp.add(y, self.mlp_norm)


@lru_cache(maxsize=8)
def _compiled(shape: _Shape) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `_project` and `_finish`, traced once for each number of rows."""
    project = mx.compile(lambda *arrays: _project(shape, *arrays))
    finish = mx.compile(lambda *arrays: _finish(shape, *arrays))
    return lambda _, *arrays: project(*arrays), lambda _, *arrays: finish(*arrays)


def _project(shape: _Shape, x: mx.array, weights: Weights, norms: Weights) -> Projected:
    """Return queries, keys and values `[rows, heads, dim]`, and gates `[rows, heads * dim]`."""
    norm, q_norm, k_norm = norms
    y = shape.products.multiply(mx.fast.rms_norm(x, norm, shape.eps), weights)
    rows, dim = x.shape[0], shape.dim
    ends = [shape.heads * dim, (shape.heads + shape.kv_heads) * dim]
    ends.append(ends[1] + shape.kv_heads * dim)
    q, k, v, gate = mx.split(y, ends, axis=-1)
    return (
        mx.fast.rms_norm(q.reshape(rows, -1, dim), q_norm, shape.head_eps),
        mx.fast.rms_norm(k.reshape(rows, -1, dim), k_norm, shape.head_eps),
        v.reshape(rows, -1, dim),
        gate,
    )


def _finish(
    shape: _Shape,
    x: mx.array,
    merged: mx.array,
    gate: mx.array,
    out: Weights,
    norm: mx.array,
    mlp: Any,
) -> mx.array:
    """Return `x` plus the gated projection of `merged`, and plus the MLP if it is joined."""
    x = x + shape.out.multiply(merged * mx.sigmoid(gate), out)
    if shape.mlp is None:
        return x
    return x + gated_products(shape.mlp, mlp, mx.fast.rms_norm(x, norm, shape.eps))
