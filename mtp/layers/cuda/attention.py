"""Gated attention with fused projections and the kernels of `row_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mtp.layers.cuda.kernel import HALF_TYPES
from mtp.layers.cuda.packed_linear import (
    FEW_ROWS,
    PackedLinear,
    PackedMLP,
    add_packed_mlp,
    joined,
)
from mtp.layers.cuda.row_attention import (
    SLOTS,
    SPLIT,
    attend_rows,
    prepare_rows,
)
from mtp.layers.kv_cache import PlainKV, tiled_attention
from mtp.layers.layer import Exact, Hole, KVFormat, Layer, PlainMLP
from mtp.layers.prepare_rows import HEAD_DIM, AttentionShape, can_prepare, constants_of

KV_STEP = 256
"""Tokens by which a K/V cache grows, as mlx-lm's does."""

MOST_GROUPED = 16
"""Query heads for each K/V head that the kernel holds in registers."""


def can_pack_attention(attention: Qwen3NextAttention, dtype: mx.Dtype) -> bool:
    """Return whether the kernels compute `attention` with activations of `dtype`."""
    return (
        dtype in HALF_TYPES
        and can_prepare(attention)
        and attention.num_attention_heads // attention.num_key_value_heads <= MOST_GROUPED
        and attention.q_norm.weight.dtype == dtype
    )


PARTIAL_BYTES = 128 * 2**20
"""Bytes. Bound of the partial results of one launch: one output of each head for each split of the keys."""


class PackedAttentionLayer(Layer):
    """An attention layer whose query, key and value projections are one."""

    kind = "packed"

    def __init__(self, layer: DecoderLayer, mlp: PackedMLP | None) -> None:
        """Pack `layer`, whose MLP is `mlp` if that is packed."""
        attention = layer.self_attn
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.mlp: PackedMLP | PlainMLP = PlainMLP(layer.mlp) if mlp is None else mlp
        self.shape = shape_of(attention)
        self.constants = constants_of(attention)
        self.scale = mx.array([attention.scale])
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = joined([attention.o_proj])
        self._mlp_weights = () if mlp is None else mlp.weights(self.mlp_norm)
        self._one_arithmetic = False
        """True keeps to the row kernel for any number of rows. Otherwise prompt chunks take MLX's attention."""
        mx.eval(self.constants, self.scale)

    def new_cache(self, kv_format: KVFormat) -> PlainKV:
        """See `Layer.new_cache`."""
        assert kv_format.bits is None, "the kernels read keys and values in the type of the model"
        return PlainKV()

    def pin_exact(self, products: Exact) -> None:
        """See `Layer.pin_exact`."""
        self._one_arithmetic = True
        self.qkv.pin_exact(products)
        self.out.pin_exact(products)
        self.mlp.pin_exact(products)

    def add(
        self,
        x: mx.array,
        caches: Sequence[PlainKV],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """See `Layer.add`. A row behind a hole goes before the end of its cache by the hole's count."""
        norm = self.norm
        for cache, width in zip(caches, widths, strict=True):
            _reserve(cache, width, self.shape.kv_heads, x.dtype)
        offsets = tuple(cache.offset for cache in caches)
        keys = [cast(mx.array, cache.keys) for cache in caches]
        values = [cast(mx.array, cache.values) for cache in caches]
        lengths = tuple(held.shape[2] for held in keys)
        places, caps, starts = _row_arrays(tuple(widths), offsets, lengths)
        if holes:
            counts = mx.concatenate([hole.count for hole in holes])
            places, starts = _moved_back(places, starts, counts)
        constants, qkv, out = (*self.constants, self.scale), self.qkv, self.out
        many = x.shape[0] > FEW_ROWS
        has_mlp = False
        if many and not self._one_arithmetic:
            rows = qkv(norm(x))
            q, k, v = prepare_rows(self.shape, rows, _together(places), self.constants)
            keys, values = _extended(widths, starts, k, keys), _extended(widths, starts, v, values)
            x = out(_attend_many(self.shape, widths, offsets, q, rows, keys, values), x)
        elif not many and qkv.packed and out.packed:
            body = _compiled_body(self.shape, tuple(widths), norm.eps)
            weights = (norm.weight, qkv.w, qkv.factors, out.w, out.factors)
            x, keys, values = body(
                x, weights, self._mlp_weights, constants, places, caps, starts, keys, values
            )
            has_mlp = bool(self._mlp_weights)
        else:
            rows = qkv(norm(x))
            y, keys, values = _attend_few(
                self.shape, widths, rows, constants, places, caps, starts, keys, values
            )
            x = out(y, x)
        for cache, longer_keys, longer_values, width in zip(
            caches, keys, values, widths, strict=True
        ):
            cache.keys, cache.values = longer_keys, longer_values
            cache.offset += width
        return x if has_mlp else self.mlp.add(x, self.mlp_norm)


def shape_of(attention: Qwen3NextAttention) -> AttentionShape:
    """Return the shape of `attention` for the kernels."""
    return AttentionShape(
        attention.num_attention_heads, attention.num_key_value_heads, attention.rope.dims
    )


@lru_cache(maxsize=256)
def _compiled_body(
    shape: AttentionShape, widths: tuple[int, ...], eps: float
) -> Callable[..., Any]:
    """Return the layer for sequences of `widths`, traced once for every shape of the arguments.

    It includes the MLP if its arguments have the weights of one.
    """

    def body(
        x: mx.array, weights: Any, mlp: Any, constants: Any, places: Any, caps: Any, starts: mx.array,
        keys: Any, values: Any,
    ) -> Any:  # fmt: skip
        norm, w, factors, out_w, out_factors = weights
        rows = PackedLinear(w, factors)(mx.fast.rms_norm(x, norm, eps))
        y, keys, values = _attend_few(
            shape, widths, rows, constants, places, caps, starts, keys, values
        )
        x = PackedLinear(out_w, out_factors)(y, x)
        return (add_packed_mlp(mlp, eps, x) if mlp else x), keys, values

    return mx.compile(body)


def _attend_few(
    shape: AttentionShape,
    widths: Sequence[int],
    rows: mx.array,
    constants: Sequence[mx.array],
    places: Sequence[mx.array],
    caps: Sequence[mx.array],
    starts: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Attend row by row, `SLOTS` sequences a launch. Return the outputs and the longer K/V arrays."""
    *constants, scale = constants
    q, k, v = prepare_rows(shape, rows, _together(places), tuple(constants))
    keys, values = _extended(widths, starts, k, keys), _extended(widths, starts, v, values)
    if len(places) == 1 and rows.shape[0] <= FEW_ROWS:
        return attend_rows(shape, q, rows, places[0], caps[0], scale, keys, values), keys, values
    outputs, start = [], 0
    for group, (at, cap) in enumerate(zip(places, caps, strict=True)):
        held = slice(group * SLOTS, (group + 1) * SLOTS)
        splits = -(-max(k.shape[2] for k in keys[held]) // SPLIT)
        tile = max(1, PARTIAL_BYTES // (shape.query_heads * splits * HEAD_DIM * 4))
        for first in range(0, at.shape[0], tile):
            some = at[first : first + tile]
            own = slice(start, start + some.shape[0])
            outputs.append(
                attend_rows(shape, q[own], rows[own], some, cap, scale, keys[held], values[held])
            )
            start += some.shape[0]
    return mx.concatenate(outputs), keys, values


def _attend_many(
    shape: AttentionShape,
    widths: Sequence[int],
    offsets: Sequence[int],
    q: mx.array,
    rows: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
) -> mx.array:
    """Attend sequence by sequence with MLX's own attention, for prompt chunks. Return the outputs."""
    outputs, start = [], 0
    for i, width in enumerate(widths):
        own = q[None, start : start + width].transpose(0, 2, 1, 3)
        out = tiled_attention(own, keys[i], values[i], offsets[i], HEAD_DIM**-0.5)
        outputs.append(out.transpose(0, 2, 1, 3).reshape(width, -1))
        start += width
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    heads = shape.query_heads
    gate = rows[:, : 2 * heads * HEAD_DIM].reshape(-1, heads, 2 * HEAD_DIM)[..., HEAD_DIM:]
    return out * mx.sigmoid(gate.reshape(out.shape))


def _together(places: Sequence[mx.array]) -> mx.array:
    return places[0] if len(places) == 1 else mx.concatenate(list(places))


def _extended(
    widths: Sequence[int], starts: mx.array, new: mx.array, held: Sequence[mx.array]
) -> list[mx.array]:
    """Write each sequence's rows of `new [kv_heads, rows, dim]` into its array, at its start."""
    longer, row = [], 0
    for i, width in enumerate(widths):
        own = new[None] if len(widths) == 1 else new[None, :, row : row + width]
        longer.append(mx.slice_update(held[i], own, starts[i], axes=(2,)))
        row += width
    return longer


def _reserve(cache: PlainKV, width: int, kv_heads: int, dtype: mx.Dtype) -> None:
    """Make room for `width` more tokens."""
    total = cache.offset + width
    if cache.keys is not None and total <= cache.keys.shape[2]:
        return
    room = mx.zeros((1, kv_heads, -(-total // KV_STEP) * KV_STEP - cache.offset, HEAD_DIM), dtype)
    if cache.keys is None:
        cache.keys, cache.values = room, room
        return
    keys, values = cache.keys_and_values()
    cache.keys = mx.concatenate([keys, room], axis=2)
    cache.values = mx.concatenate([values, room], axis=2)


@lru_cache(maxsize=16)
def _row_arrays(
    widths: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[list[mx.array], list[mx.array], mx.array]:
    """Return places and caps of every group of `SLOTS` sequences, and every sequence's start.

    All attention layers of a frame share them.
    """
    places, caps = [], []
    for first in range(0, len(widths), SLOTS):
        group = range(first, min(first + SLOTS, len(widths)))
        rows = [(i - first, offsets[i] + row) for i in group for row in range(widths[i])]
        places.append(mx.array(rows, dtype=mx.int32))
        known = [lengths[i] for i in group]
        caps.append(mx.array(known + [0] * (SLOTS - len(known)), dtype=mx.int32))
    return places, caps, mx.array([[offset] for offset in offsets], dtype=mx.int32)


def _moved_back(
    places: Sequence[mx.array], starts: mx.array, counts: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Return the places and starts of one row a sequence, each moved back by its own of `counts`."""
    columns = mx.stack([mx.zeros_like(counts), counts], axis=1)
    moved = [
        group - columns[first : first + group.shape[0]]
        for first, group in zip(range(0, counts.size, SLOTS), places, strict=True)
    ]
    return moved, starts - counts[:, None]
