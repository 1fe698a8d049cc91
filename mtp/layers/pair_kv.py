"""Keys and values of one sequence in one array."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtp.layers.kv_cache import KVRows, tiled_attention
from proto.errors import ProtocolError

KV_STEP = 256
"""Tokens by which a cache grows, as mlx-lm's does."""


class PairKV(KVRows):
    """Keys and values in the type of the model, `pair [2, kv_heads, room, dim]`, which one operation writes."""

    def __init__(self) -> None:
        self.pair: mx.array | None = None
        self.offset = 0

    @property
    def keys(self) -> mx.array | None:
        """The keys `[1, kv_heads, room, dim]`, with the room for more."""
        return None if self.pair is None else self.pair[:1]

    @property
    def room(self) -> int:
        """Tokens for which the array has room."""
        return 0 if self.pair is None else self.pair.shape[2]

    def trim(self, count: int) -> int:
        """See `KVRows.trim`."""
        count = min(self.offset, count)
        self.offset -= count
        return count

    def reserve(self, width: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> None:
        """Make room for `width` more tokens."""
        start, pair = self.offset, self.pair
        end = start + width
        if pair is not None and end <= pair.shape[2]:
            return
        room = -(-end // KV_STEP) * KV_STEP
        longer = mx.zeros((2, kv_heads, room - start, dim), dtype)
        self.pair = longer if pair is None else mx.concatenate([pair[:, :, :start], longer], axis=2)

    def write(self, new: mx.array) -> mx.array:
        """Append `new [2, kv_heads, width, dim]`. Return the whole array, with the room for more.

        MLX writes into the array's own memory if nothing else refers to it. On CUDA it does so only at a place that
        the host knows: `mx.slice_update` at a place from the device copies the array.
        """
        _two, kv_heads, width, dim = new.shape
        self.reserve(width, kv_heads, dim, new.dtype)
        assert self.pair is not None
        self.pair[:, :, self.offset : self.offset + width] = new
        self.offset += width
        return self.pair

    def append(self, new: mx.array) -> tuple[mx.array, mx.array]:
        """Append `new` as `write` does. Return all keys and all values."""
        self.write(new)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the keys and the values `[1, kv_heads, offset, dim]`."""
        keys, values = self._parts()
        return keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `KVRows.update_and_fetch`."""
        return self.append(mx.concatenate([keys, values]))

    def attend_pair(self, q: mx.array, new: mx.array, scale: float) -> mx.array:
        offset = self.offset
        keys, values = self.append(new)
        if new.shape[2] == 1:
            return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale)
        return tiled_attention(q, keys, values, offset, scale)

    def arrays(self) -> list[mx.array]:
        return [] if self.pair is None else [self.pair]

    def _parts(self, start: int = 0) -> list[mx.array]:
        assert self.pair is not None
        return [self.pair[i : i + 1, :, start : self.offset] for i in range(2)]

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        if len(parts) != 2 or parts[0].shape != parts[1].shape:
            raise ProtocolError("a backup of keys and values has not two arrays of one shape")
        self.pair = mx.concatenate(list(parts))

    def _empty(self) -> PairKV:
        return PairKV()
