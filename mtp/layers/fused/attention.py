"""Attention whose projections are one product, with everything around MLX's attention compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.communicator import Communicator
from mtp.layers.few_rows import Weights
from mtp.layers.kv_cache import KVRows, PairKV, new_kv
from mtp.layers.layer import Hole, KVFormat
from mtp.layers.linear import Format, Fuse, FusedEnds, FusedLinear, FusedMLP, compiled, release
from mtp.layers.prepare_rows import (
    HEAD_DIM,
    AttentionShape,
    constants_of,
    prepare_kernel,
    run_prepare,
)
from mtp.layers.reference.attention import AttentionLayer, Projected
from mtp.layers.rope import KernelRotations
from mtp.layers.source_kernel import MetalKernel

Projections = tuple[FusedLinear, FusedLinear]
"""The input projections of a layer as one, and its output projection."""


def fused_projections(attention: Any, fuse: Fuse = FusedLinear.of) -> Projections | None:
    """Return the projections of a layer, fused by `fuse`, or None if they have different formats."""
    if attention.q_norm.eps != attention.k_norm.eps or Format.of(attention.o_proj) is None:
        return None
    heads, dim = attention.num_attention_heads, attention.head_dim
    keys = 2 * attention.num_key_value_heads * dim
    # Queries and gates alternate head by head. Here the gates of all heads are last.
    alternating = mx.arange(2 * heads * dim).reshape(heads, 2, dim)
    order = [alternating[:, 0].flatten(), 2 * heads * dim + mx.arange(keys)]
    order.append(alternating[:, 1].flatten())
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    inputs = fuse(parts, mx.concatenate(order))
    out = fuse([attention.o_proj])
    if inputs is None or out is None:
        return None
    release([attention.o_proj])
    return inputs, out


@dataclass(frozen=True)
class _Shape:
    """The heads of a layer, the epsilon of their norms, the elements that RoPE rotates, and the products around."""

    heads: int
    kv_heads: int
    dim: int
    head_eps: float
    rope: int
    ends: FusedEnds


class FusedAttentionLayer(AttentionLayer):
    """An attention layer in fused products."""

    kind = "fused"

    def __init__(self, layer: DecoderLayer, parts: Projections, mlp: FusedMLP | None, *, fuses_norm: bool) -> None:
        """Take over `layer` with its projections. With `fuses_norm` a kernel adds the residual before the norm."""
        super().__init__(layer)
        inputs, out = parts
        if mlp is not None:
            self.mlp = mlp
        attention = self.attention
        self._shape = _Shape(
            attention.num_attention_heads,
            attention.num_key_value_heads,
            attention.head_dim,
            attention.q_norm.eps,
            attention.rope.dims,
            FusedEnds(inputs.format, out.format, mlp.formats if mlp else None, self.norm.eps, fuses_norm),
        )
        self._inputs = (self.norm.weight, inputs.weights)
        self._outputs = (out.weights, self.mlp_norm.weight, mlp.weights if mlp else ())
        self._compile()

    def _compile(self) -> None:
        self._compiled = [compiled(part, self._shape) for part in (_project, _finish, _prepare)]

    def share(self, communicator: Communicator) -> None:
        super().share(communicator)
        self._shape = replace(self._shape, ends=replace(self._shape.ends, communicator=communicator))
        self._compile()

    def _project(
        self, x: mx.array, caches: Sequence[KVRows], widths: Sequence[int], holes: Sequence[Hole]
    ) -> Projected:
        norms = self.attention.q_norm.weight, self.attention.k_norm.weight
        project = self._compiled[0] if x.shape[0] <= FusedEnds.most_rows else _project
        projected: Projected = project(self._shape, x, self._inputs, norms)
        return projected

    def _finish(self, x: mx.array, merged: mx.array, gate: mx.array) -> mx.array:
        finish = self._compiled[1] if x.shape[0] <= FusedEnds.most_rows else _finish
        y: mx.array = finish(self._shape, x, merged, gate, self._outputs)
        return y if self._shape.ends.mlp else self.mlp.add_output(y, self.mlp_norm)


class PreparedAttentionLayer(FusedAttentionLayer):
    """An attention layer whose heads are normed and rotated in one launch, with keys and values in one array."""

    kind = "prepared"

    def __init__(self, layer: DecoderLayer, parts: Projections, mlp: FusedMLP | None, *, fuses_norm: bool) -> None:
        super().__init__(layer, parts, mlp, fuses_norm=fuses_norm)
        self._constants = constants_of(self.attention)
        mx.eval(self._constants)

    def new_cache(self, kv_format: KVFormat) -> KVRows:
        cache = PairKV() if kv_format.bits is None else new_kv(kv_format)
        return cache.with_rows(self.attention.num_key_value_heads, HEAD_DIM)

    def forward(
        self,
        x: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        rotations = KernelRotations.of(self.attention.rope, caches, widths)
        ends, places = _places(tuple(widths), rotations.starts)
        if holes:
            places = places - mx.concatenate([hole.count for hole in holes])[:, None]
        run = self._compiled[2] if x.shape[0] <= FusedEnds.most_rows else _prepare
        q, new, gate = run(self._shape, x, self._inputs, self._constants, places)
        if rotations.rotations is not None:
            rows_first, new = rotations.rotate_new(q[0].transpose(1, 0, 2), new)
            q = rows_first.transpose(1, 0, 2)[None]
        queries, rows = mx.split(q, ends, axis=2), mx.split(new, ends, axis=2)
        scale = self.attention.scale
        if holes:
            outputs = [
                cache.attend_around(q, new[:1], new[1:], scale, hole)
                for cache, q, new, hole in zip(caches, queries, rows, holes, strict=True)
            ]
        else:
            outputs = [
                cache.attend_pair(q, new, scale, self.windows)
                for cache, q, new in zip(caches, queries, rows, strict=True)
            ]
        merged = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return self._finish(x, merged.squeeze(0).transpose(1, 0, 2), gate)


@lru_cache(maxsize=16)
def _places(widths: tuple[int, ...], starts: tuple[int | None, ...]) -> tuple[list[int], mx.array]:
    """Return where sequences end, but for the last, and every row's position twice. All layers of a frame share them.

    The kernel reads the second column.
    """
    found = [(place, place) for place in KernelRotations(starts, None).places(widths)]
    return list(accumulate(widths[:-1])), mx.array(found, dtype=mx.int32)


def _project(shape: _Shape, x: mx.array, inputs: Any, norms: Weights) -> Projected:
    """Return queries, keys and values `[rows, heads, dim]`, and gates `[rows, heads * dim]`."""
    q_norm, k_norm = norms
    y = shape.ends.project(x, inputs)
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


def _prepare(
    shape: _Shape, x: mx.array, inputs: Any, constants: Weights, places: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries `[1, heads, rows, 256]`, keys and values `[2, kv_heads, rows, 256]`, and gates."""
    y = shape.ends.project(x, inputs)
    heads = AttentionShape(shape.heads, shape.kv_heads, shape.rope)
    q, new = prepare_rows(heads, y, places, constants)
    gate = y[:, -shape.heads * HEAD_DIM :].reshape(-1, shape.heads, HEAD_DIM)
    return mx.expand_dims(q.transpose(1, 0, 2), 0), new, gate


_kernel = prepare_kernel(MetalKernel, "h * D")


def prepare_rows(shape: AttentionShape, x: mx.array, places: mx.array, constants: Weights) -> tuple[mx.array, mx.array]:
    """See `run_prepare`. A row of `x` has queries, keys, values and gates."""
    q_norm, k_norm, *rest = constants
    constants = (q_norm.astype(x.dtype), k_norm.astype(x.dtype), *rest)
    return run_prepare(_kernel, shape, x, places, constants)


def _finish(shape: _Shape, x: mx.array, merged: mx.array, gate: mx.array, outputs: Any) -> mx.array:
    """Return `x` plus the gated projection of `merged`, and plus the MLP if it is fused."""
    return shape.ends.finish(x, (merged * mx.sigmoid(gate)).reshape(x.shape[0], -1), outputs)
