"""Gated full attention over flat rows: many sequences in one pass, each with its own cache and length.

The projections process all rows at once. RoPE processes neighbouring sequences of equal width at once. The K/V cache
and the attention itself are per sequence. The modules, their weights and the caches are mlx-lm's own
(`Qwen3NextAttention`, `KVCache`, `QuantizedKVCache`), or a `PackedAttention` replaces the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mtp.head.joined_attention import JoinedAttention, turns_of
from mtp.head.packed_attention import PackedAttention
from mtp.head.tiled_attention import tiled_attention
from mtp.kernels.projections import add_mlp

KV = KVCache | QuantizedKVCache


@dataclass(frozen=True)
class Hole:
    """The rejected rows of a window, which stay in a cache until the host knows how many there are.

    They are the `count` entries before `end`. `count` is int32 `[1]`, lazy. A new row has its position as if they were
    removed.
    """

    end: int
    count: mx.array


@dataclass(frozen=True)
class KVFormat:
    """The format of stored K/V. `bits` None is the model's dtype; 4 and 8 quantize in groups along head_dim."""

    bits: int | None = None
    group_size: int = 64

    @classmethod
    def of(cls, head_dim: int, bits: int | None) -> KVFormat:
        """Return the format with the widest groups that divide a head: 64, or 32 for narrower heads."""
        return cls(bits, group_size=32 if head_dim % 64 else 64)

    def new_cache(self) -> KV:
        """Return an empty cache of this format."""
        if self.bits is None:
            return KVCache()
        return QuantizedKVCache(group_size=self.group_size, bits=self.bits)


def add_attention(
    attention: Qwen3NextAttention | JoinedAttention | PackedAttention,
    norm: nn.RMSNorm,
    x: mx.array,
    caches: Sequence[KV],
    widths: Sequence[int],
    holes: Sequence[Hole] = (),
    queries: int | None = None,
    mlp: tuple[nn.Module, nn.RMSNorm] | None = None,
) -> mx.array:
    """Return `x [rows, hidden]` plus the attention of its norm. Sequence i owns the next `widths[i]` rows.

    Adds the MLP of the layer too if `mlp` has it and its norm. Appends to each cache. If there are `holes`, every
    cache has one, and every width is 1. Where `queries` is given, it bounds the rows of a call of
    MLX's attention, and RoPE takes one sequence.
    """
    if isinstance(attention, PackedAttention):
        counts = [hole.count for hole in holes]
        return attention.add(x, norm, cast(Sequence[KVCache], caches), widths, counts, mlp)
    x = x + attend(attention, norm(x), caches, widths, holes, queries)
    return x if mlp is None else add_mlp(*mlp, x)


def attend(
    attention: Qwen3NextAttention | JoinedAttention,
    x: mx.array,
    caches: Sequence[KV],
    widths: Sequence[int],
    holes: Sequence[Hole] = (),
    queries: int | None = None,
) -> mx.array:
    """Return the attention of `x [rows, hidden]`. Sequence i owns the next `widths[i]` rows.

    Appends to each cache. See `add_attention` for `holes` and `queries`.
    """
    rows, turned = x.shape[0], isinstance(attention, JoinedAttention)
    if isinstance(attention, JoinedAttention):
        moved = mx.concatenate([hole.count for hole in holes]) if holes else None
        turns = turns_of(attention.rope, [cache.offset for cache in caches], widths, moved)
        q_rows, keys, values, gate = attention.project(x, turns)
    else:
        q_rows, keys, values, gate = _project(attention, x)

    outputs: list[mx.array] = []
    start = 0
    runs = _runs_of(widths) if queries is None else ((width, 1) for width in widths)
    for width, count in runs:
        own = slice(start, start + width * count)
        group = caches[len(outputs) : len(outputs) + count]
        q, k, v = (
            t[own].reshape(count, width, *t.shape[1:]).transpose(0, 2, 1, 3)
            for t in (q_rows, keys, values)
        )
        offsets = [cache.offset for cache in group]
        if not turned and holes:
            q, k = _turned_at(attention.rope, q, k, offsets, holes)
        elif not turned:
            q, k = _turned(attention.rope, q, k, offsets)
        for i, cache in enumerate(group):
            one = slice(i, i + 1)
            if holes:
                out = _attend_around(attention, q[one], k[one], v[one], cache, holes[i])
            else:
                out = _attend_one(attention, q[one], k[one], v[one], cache, queries)
            outputs.append(out.transpose(0, 2, 1, 3).reshape(width, -1))
        start += width * count
    merged = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    y: mx.array = attention.o_proj(merged * mx.sigmoid(gate.reshape(rows, -1)))
    return y


def _project(
    attention: Qwen3NextAttention, x: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return queries, keys and values `[rows, heads, dim]`, and the gates of `x [rows, hidden]`, before RoPE."""
    rows = x.shape[0]
    q_rows, gate = mx.split(
        attention.q_proj(x).reshape(rows, attention.num_attention_heads, -1), 2, axis=-1
    )
    kv_shape = (rows, attention.num_key_value_heads, -1)
    keys = attention.k_norm(attention.k_proj(x).reshape(kv_shape))
    return attention.q_norm(q_rows), keys, attention.v_proj(x).reshape(kv_shape), gate


def _attend_one(
    attention: Qwen3NextAttention | JoinedAttention,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cache: KV,
    queries: int | None,
) -> mx.array:
    """Append `k` and `v [1, kv_heads, width, dim]` to `cache`. Return the attention of `q [1, heads, width, dim]`."""
    offset, width = cache.offset, q.shape[2]
    k, v = cache.update_and_fetch(k, v)
    if isinstance(cache, KVCache):
        return tiled_attention(q, k, v, offset, attention.scale, queries)
    tile = width if queries is None else queries
    outputs = [
        _attend_quantized(attention, q[:, :, start : start + tile], k, v, cache, offset + start)
        for start in range(0, width, tile)
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _attend_quantized(
    attention: Qwen3NextAttention | JoinedAttention,
    q: mx.array,
    k: Any,
    v: Any,
    cache: KV,
    offset: int,
) -> mx.array:
    """Return the attention of `q [1, heads, width, dim]` at `offset` over quantized keys and values."""
    width = q.shape[2]
    keys, values = (tuple(part[:, :, : offset + width] for part in held) for held in (k, v))
    mask: Any = "causal" if width > 1 else None  # mlx-lm's annotation lacks the string
    out: mx.array = scaled_dot_product_attention(
        q, keys, values, cache=cache, scale=attention.scale, mask=mask
    )
    return out


def _attend_around(
    attention: Qwen3NextAttention | JoinedAttention,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cache: KV,
    hole: Hole,
) -> mx.array:
    """Append one row to `cache`, and return its attention to all entries but those of `hole`."""
    k, v = cache.update_and_fetch(k, v)
    places = mx.arange(cache.offset)
    visible = (places < hole.end - hole.count) | (places >= hole.end)
    out: mx.array = scaled_dot_product_attention(
        q, k, v, cache=cache, scale=attention.scale, mask=visible[None, None, None]
    )
    return out


def _turned_at(
    rope: Any, q: mx.array, k: mx.array, offsets: Sequence[int], holes: Sequence[Hole]
) -> tuple[mx.array, mx.array]:
    """Return `q` and `k [n, heads, 1, dim]` after RoPE, at the positions that the rows have without the holes."""
    starts = mx.array(list(offsets), dtype=mx.int32) - mx.concatenate([h.count for h in holes])
    return rope(q, offset=starts), rope(k, offset=starts)


def _turned(
    rope: Any, q: mx.array, k: mx.array, offsets: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Return `q` and `k [n, heads, width, dim]` after RoPE, sequence i from `offsets[i]` on."""
    if len(offsets) == 1:
        return rope(q, offset=offsets[0]), rope(k, offset=offsets[0])
    starts = mx.array(list(offsets), dtype=mx.int32)
    return rope(q, offset=starts), rope(k, offset=starts)


def _runs_of(widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each width and how many sequences in a row have it."""
    for width, group in groupby(widths):
        yield width, len(list(group))


def state_of(cache: KV) -> list[mx.array]:
    """Return the arrays of a cache, for `mx.eval` and for counting bytes."""
    if cache.keys is None:
        return []
    if isinstance(cache, QuantizedKVCache):
        return [*cast(Iterable[mx.array], cache.keys), *cast(Iterable[mx.array], cache.values)]
    return [cache.keys, cache.values]


def copy_of(cache: KV) -> KV:
    """Return an independent copy with the valid tokens only."""
    if isinstance(cache, QuantizedKVCache):
        copy: KV = QuantizedKVCache(group_size=cache.group_size, bits=cache.bits)
    else:
        copy = KVCache()
    copy.offset = cache.offset
    if cache.keys is not None:
        keys, values = cache.keys_and_values()
        if isinstance(cache, QuantizedKVCache):
            copy.keys = tuple(mx.contiguous(k) for k in keys)
            copy.values = tuple(mx.contiguous(v) for v in values)
        else:
            copy.keys, copy.values = mx.contiguous(keys), mx.contiguous(values)
    return copy
