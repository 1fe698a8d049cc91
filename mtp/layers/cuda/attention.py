"""Gated attention with fused projections and the kernels of `row_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mtp.layers.communicator import Communicator
from mtp.layers.cuda.packed_linear import FEW_ROWS, PackedEnds, PackedMLP, add_product, fused
from mtp.layers.cuda.row_attention import (
    MOST_GROUPED,
    SLOTS,
    SPLIT,
    InPlaceKV,
    RowArrays,
    attend_rows,
    prepare_rows,
    write_rows,
)
from mtp.layers.exact import ExactProducts
from mtp.layers.kv_cache import tiled_attention
from mtp.layers.layer import Hole, KVFormat, Layer, PlainMLP
from mtp.layers.linear import compiled
from mtp.layers.prepare_rows import HEAD_DIM, AttentionShape, can_prepare, constants_of
from mtp.layers.rope import KernelRotations


def can_pack_attention(attention: Qwen3NextAttention, dtype: mx.Dtype) -> bool:
    """Return whether the kernels compute `attention` with activations of `dtype`, of half precision."""
    return (
        can_prepare(attention)
        and attention.num_attention_heads // attention.num_key_value_heads <= MOST_GROUPED
        and attention.q_norm.weight.dtype == dtype
    )


PARTIAL_BYTES = 128 * 2**20
"""Bytes. Bound of the partial results of one launch: one output of each head for each split of the keys."""


class PackedAttentionLayer(Layer):
    """An attention layer whose query, key and value projections are one."""

    kind = "packed"

    def __init__(self, layer: DecoderLayer, mlp: PackedMLP | None, *, exact: bool = False) -> None:
        """Pack `layer`, whose MLP is `mlp` if that is packed."""
        attention = layer.self_attn
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.mlp: PackedMLP | PlainMLP = PlainMLP(layer.mlp) if mlp is None else mlp
        self.shape = shape_of(attention)
        self.constants = constants_of(attention)
        self.rope = attention.rope
        self.scale = mx.array([attention.scale])
        self.qkv = fused([attention.q_proj, attention.k_proj, attention.v_proj], exact=exact)
        self.out = fused([attention.o_proj], exact=exact)
        self._mlp_weights = () if mlp is None else mlp.weights(self.mlp_norm)
        self._one_arithmetic = False
        """True keeps to the row kernel for any number of rows. Otherwise prompt chunks take MLX's attention."""
        mx.eval(self.constants, self.scale)
        self.share(self.communicator)

    def share(self, communicator: Communicator) -> None:
        super().share(communicator)
        self._parts = self.shape, PackedEnds(self.norm.eps, communicator)
        self._compiled = [compiled(part, self._parts) for part in (_project, _finish)]

    def new_cache(self, kv_format: KVFormat) -> InPlaceKV:
        assert kv_format.bits is None, "the kernels read keys and values in the type of the model"
        return InPlaceKV().with_rows(self.shape.kv_heads, HEAD_DIM)

    def pin_exact(self, products: ExactProducts) -> None:
        self._one_arithmetic = True
        self.qkv.pin_exact(products)
        self.out.pin_exact(products)
        self.mlp.pin_exact(products)

    def forward(
        self,
        x: mx.array,
        caches: Sequence[InPlaceKV],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        qkv, out = self.qkv, self.out
        for cache, width in zip(caches, widths, strict=True):
            cache.reserve(width, self.shape.kv_heads, HEAD_DIM, x.dtype)
        rotations = KernelRotations.of(self.rope, caches, widths)
        ends = tuple((cache.offset, cache.room) for cache in caches)
        groups = _row_arrays(tuple(widths), ends, rotations.starts)
        if holes:
            groups = _around(groups, holes)
        few = x.shape[0] <= FEW_ROWS
        if few and qkv.weights:
            inputs = (self.norm.weight, qkv.weights)
            q, new, rows = self._compiled[0](self._parts, x, inputs, self.constants, _places(groups))
        else:
            rows = qkv(self.norm(x))
            q, new = prepare_rows(self.shape, rows, _places(groups), self.constants)
        q, new = rotations.rotate_new(q, new)
        pairs, groups = _write(caches, widths, new, groups, few=few)
        if few and out.weights:
            outputs = (out.weights, self._mlp_weights)
            x = self._compiled[1](self._parts, x, outputs, q, rows, groups, self.scale, pairs)
            return x if self._mlp_weights else self.mlp.add_output(x, self.mlp_norm)
        if few or holes or self._one_arithmetic:
            y = _attend_few(self.shape, q, rows, groups, self.scale, pairs)
        else:
            y = _attend_many(self.shape, caches, widths, q, rows)
        return self.mlp.add_output(add_product(self.communicator, out, y, x), self.mlp_norm)


def shape_of(attention: Qwen3NextAttention) -> AttentionShape:
    """Return the shape of `attention` for the kernels."""
    return AttentionShape(attention.num_attention_heads, attention.num_key_value_heads, attention.rope.dims)


Parts = tuple[AttentionShape, PackedEnds]


def _project(parts: Parts, x: mx.array, inputs: Any, constants: Any, places: mx.array) -> Any:
    """Return queries, keys and values of `prepare_rows`, and the projected rows."""
    shape, ends = parts
    rows = ends.project(x, inputs)
    return *prepare_rows(shape, rows, places, tuple(constants)), rows


def _finish(
    parts: Parts, x: mx.array, outputs: Any, q: mx.array, rows: mx.array, groups: Any, scale: mx.array, pairs: Any
) -> Any:
    """Return the layer from the attention on."""
    shape, ends = parts
    return ends.finish(x, _attend_few(shape, q, rows, groups, scale, pairs), outputs)


def _write(
    caches: Sequence[InPlaceKV],
    widths: Sequence[int],
    new: mx.array,
    groups: Sequence[RowArrays],
    *,
    few: bool,
) -> tuple[list[mx.array], tuple[RowArrays, ...]]:
    """Append `new [2, kv_heads, rows, 256]` to the caches. Return their arrays, and `groups` that wait for them."""
    waiting, start = [], 0
    for number, group in enumerate(groups):
        some = slice(number * SLOTS, (number + 1) * SLOTS)
        own, end = caches[some], start + group.places.shape[0]
        if few and all(cache.takes(new) for cache in own):
            rows = new if len(groups) == 1 else new[:, :, start:end]
            before = [group.written if c.written is None else c.written for c in own]
            group = group._replace(written=write_rows(rows, group, _pairs(own), before))
            for cache, width in zip(own, widths[some], strict=True):
                cache.add_rows(width, group.written)
        else:
            ends = accumulate(widths[some], initial=start)
            for cache, (first, last) in zip(own, pairwise(ends), strict=True):
                cache.write(new if len(caches) == 1 else new[:, :, first:last])
        waiting.append(group)
        start = end
    return _pairs(caches), tuple(waiting)


def _pairs(caches: Sequence[InPlaceKV]) -> list[mx.array]:
    return [cache.pair for cache in caches if cache.pair is not None]


def _attend_few(
    shape: AttentionShape,
    q: mx.array,
    rows: mx.array,
    groups: Sequence[RowArrays],
    scale: mx.array,
    pairs: Sequence[mx.array],
) -> mx.array:
    """Attend row by row, `SLOTS` sequences a launch. Return the outputs."""
    outputs, start = [], 0
    for number, group in enumerate(groups):
        held = pairs[number * SLOTS : (number + 1) * SLOTS]
        splits = -(-max(pair.shape[2] for pair in held) // SPLIT)
        tile = max(1, PARTIAL_BYTES // (shape.query_heads * splits * HEAD_DIM * 4))
        if len(groups) == 1 and rows.shape[0] <= tile:
            return attend_rows(shape, q, rows, group, scale, held)
        for first in range(0, group.places.shape[0], tile):
            some = slice(first, first + tile)
            at = group._replace(places=group.places[some], spans=group.spans[some])
            own = slice(start, start + at.places.shape[0])
            outputs.append(attend_rows(shape, q[own], rows[own], at, scale, held))
            start = own.stop
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_many(
    shape: AttentionShape,
    caches: Sequence[InPlaceKV],
    widths: Sequence[int],
    q: mx.array,
    rows: mx.array,
) -> mx.array:
    """Attend sequence by sequence with MLX's own attention, for prompt chunks. Return the outputs."""
    outputs, start = [], 0
    for cache, width in zip(caches, widths, strict=True):
        own = q[None, start : start + width].transpose(0, 2, 1, 3)
        keys, values = cache.keys_and_values()
        out = tiled_attention(own, keys, values, cache.offset - width, HEAD_DIM**-0.5)
        outputs.append(out.transpose(0, 2, 1, 3).reshape(width, -1))
        start += width
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    heads = shape.query_heads
    gate = rows[:, : 2 * heads * HEAD_DIM].reshape(-1, heads, 2 * HEAD_DIM)[..., HEAD_DIM:]
    return out * mx.sigmoid(gate.reshape(out.shape))


def _places(groups: Sequence[RowArrays]) -> mx.array:
    return groups[0].places if len(groups) == 1 else mx.concatenate([g.places for g in groups])


@lru_cache(maxsize=16)
def _row_arrays(
    widths: tuple[int, ...], ends: tuple[tuple[int, int], ...], starts: tuple[int | None, ...]
) -> tuple[RowArrays, ...]:
    """Return the arrays of every group of `SLOTS` sequences. `ends` are offset and room of each sequence.

    `starts` are those of `KernelRotations`.

    All attention layers of a frame share them.
    """
    groups = []
    for first in range(0, len(widths), SLOTS):
        some = slice(first, first + SLOTS)
        slots = list(zip(widths[some], ends[some], strict=True))
        rows = [(slot, at + i) for slot, (width, (at, _)) in enumerate(slots) for i in range(width)]
        caps = [room for _, (_, room) in slots] + [0] * (SLOTS - len(slots))
        spans = [(index, 0, 0) for _, index in rows]
        rotated = KernelRotations(starts[some], None).places(widths[some])
        rows = [(slot, place) for (slot, _), place in zip(rows, rotated, strict=True)]
        groups.append(RowArrays(*(mx.array(a, dtype=mx.int32) for a in (rows, spans, caps, [0]))))
    return tuple(groups)


def _around(groups: Sequence[RowArrays], holes: Sequence[Hole]) -> tuple[RowArrays, ...]:
    """Return the arrays of one row a sequence, each of which has the position without its hole, and does not see it."""
    moved = []
    for first, group in zip(range(0, len(holes), SLOTS), groups, strict=True):
        own = holes[first : first + SLOTS]
        counts = mx.concatenate([hole.count for hole in own])
        zeros, ends = mx.zeros_like(counts), mx.array([hole.end for hole in own], dtype=mx.int32)
        places = group.places - mx.stack([zeros, counts], axis=1)
        spans = group.spans + mx.stack([zeros, ends - counts, ends], axis=1)
        moved.append(group._replace(places=places, spans=spans))
    return tuple(moved)
