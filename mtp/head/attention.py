"""Gated full attention over flat rows: many sequences in one pass, each with its own cache and length.

The projections see all rows at once; RoPE, the K/V cache and the attention itself are per sequence. The
modules, their weights and the caches are mlx-lm's own (`Qwen3NextAttention`, `KVCache`, `QuantizedKVCache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention

KV = KVCache | QuantizedKVCache


@dataclass(frozen=True)
class KVFormat:
    """How K/V is stored. `bits` None keeps the model's dtype; 4 and 8 quantize in groups along head_dim."""

    bits: int | None = None
    group_size: int = 64

    @classmethod
    def of(cls, head_dim: int, bits: int | None) -> KVFormat:
        """The widest groups that divide a head: 64, or 32 where heads are narrower."""
        return cls(bits, group_size=32 if head_dim % 64 else 64)

    def new_cache(self) -> KV:
        if self.bits is None:
            return KVCache()
        return QuantizedKVCache(group_size=self.group_size, bits=self.bits)


def attend(
    attention: Qwen3NextAttention, x: mx.array, caches: Sequence[KV], widths: Sequence[int]
) -> mx.array:
    """Attention of `x` `[rows, hidden]`, where sequence i owns the next `widths[i]` rows.

    Appends to each cache. Returns `[rows, hidden]`.
    """
    rows = x.shape[0]
    queries, gate = mx.split(
        attention.q_proj(x).reshape(rows, attention.num_attention_heads, -1), 2, axis=-1
    )
    kv_shape = (rows, attention.num_key_value_heads, -1)
    queries = attention.q_norm(queries)
    keys = attention.k_norm(attention.k_proj(x).reshape(kv_shape))
    values = attention.v_proj(x).reshape(kv_shape)

    outputs = []
    start = 0
    for cache, width in zip(caches, widths, strict=True):
        q, k, v = (
            t[None, start : start + width].transpose(0, 2, 1, 3) for t in (queries, keys, values)
        )
        q = attention.rope(q, offset=cache.offset)
        k = attention.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        mask: Any = "causal" if width > 1 else None  # mlx-lm's annotation forgets the string
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=attention.scale, mask=mask)
        outputs.append(out.transpose(0, 2, 1, 3).reshape(width, -1))
        start += width
    merged = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return attention.o_proj(merged * mx.sigmoid(gate.reshape(rows, -1)))


def state_of(cache: KV) -> list[mx.array]:
    """The arrays a cache holds, for `mx.eval` and for counting bytes."""
    if cache.keys is None:
        return []
    if isinstance(cache, QuantizedKVCache):
        return [*cast(Iterable[mx.array], cache.keys), *cast(Iterable[mx.array], cache.values)]
    return [cache.keys, cache.values]


def copy_of(cache: KV) -> KV:
    """An independent copy that holds the valid tokens and no spare room."""
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
