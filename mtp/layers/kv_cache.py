"""Keys and values of one sequence in one attention layer, and MLX's attention over them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mtp.device import fuses_prompts, this_device
from mtp.layers.layer import KV_HEADS, CutAxis, Hole, KVFormat, LayerCache, Rows
from mtp.layers.rope import image_rotations
from mtp.layers.window_attention import Held, takes_window, window_attention
from proto.errors import ProtocolError
from proto.images import ImageLayout

SCORE_BYTES = 128 * 2**20
"""Bytes. Bound of the scores of one tile. MLX's fused kernels for heads of 256 take few queries; for more it holds
the scores of all of them: 3.2 GB for 512 queries of a 27B model at 128,000 keys."""


Shape = tuple[int, int | None]
"""The heads of an array of keys or values, and the numbers of each for a token. None is unknown."""


class KVRows(LayerCache):
    """The methods that a cache of mlx-lm lacks as the state of a layer. A cache is trimmed by its length."""

    keys: Any
    values: Any
    offset: int
    layout: ImageLayout | None = None
    """The images of the sequence. Its owner sets it; a copy has none."""
    row: tuple[int, int] | None = None
    """Heads of the keys, and the width of each. The layer sets them, and a backup with others is refused."""
    trim: Callable[[int], int]
    """Remove the last tokens. mlx-lm implements it."""
    update_and_fetch: Callable[[mx.array, mx.array], tuple[Any, Any]]
    """Append keys and values, and return all of them. mlx-lm implements it."""

    def with_rows(self, heads: int, dim: int) -> Self:
        """Set the heads of the keys and their width, and return this cache."""
        self.row = heads, dim
        return self

    @property
    def position(self) -> int:
        """The position of the next row, if it is text."""
        return self.offset + (0 if self.layout is None else self.layout.shift(self.offset))

    def image_rotations(self, rope: nn.RoPE, width: int) -> mx.array | None:
        """Return the rotations of the next `width` rows, fp32 `[width, 2, half]`, or None if all of them are text."""
        layout = self.layout
        return None if layout is None else image_rotations(rope, layout, self.offset, width)

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        queries: int | None,
        slices: int = 1,
        windows: Collection[int] = (),
    ) -> mx.array:
        """Append `k` and `v [1, kv_heads, width, dim]`. Return the attention of `q [1, heads, width, dim]`.

        `queries` bounds the rows of a call of MLX's attention, where given. Each of `slices` has a call of its own, as
        kernels of a GPU depend on the number of heads. `windows` are the widths for `takes_window`.
        """
        offset, count = self.offset, k.shape[1]
        keys, values = self.update_and_fetch(k, v)
        if slices == 1:
            if queries is None and takes_window(windows, q.shape[2], self.offset):
                return self._window(q, scale)
            return self._attention(q, keys, values, offset, scale, queries)
        heads, held = q.shape[1] // slices, max(1, count // slices)
        outputs = []
        for i in range(slices):
            first = i * count // slices
            own = slice(first, first + held)
            part = q[:, i * heads : (i + 1) * heads]
            outputs.append(self._attention(part, _heads(keys, own), _heads(values, own), offset, scale, queries))
        return mx.concatenate(outputs, axis=1)

    def _attention(
        self, q: mx.array, keys: Any, values: Any, offset: int, scale: float, queries: int | None
    ) -> mx.array:
        """Return the causal attention of `q` at `offset` to the fetched `keys` and `values`."""
        return tiled_attention(q, keys, values, offset, scale, queries)

    def attend_pair(self, q: mx.array, new: mx.array, scale: float, windows: Collection[int] = ()) -> mx.array:
        """Attend as `attend` does, with keys and values in one array `new [2, kv_heads, width, dim]`."""
        return self.attend(q, new[:1], new[1:], scale, None, windows=windows)

    def _window(self, q: mx.array, scale: float) -> mx.array:
        """Return the attention of the last rows `q` by the kernel for windows."""
        keys, values = self._buffers()
        return window_attention(q, keys, values, self.offset, scale, KVFormat())

    def _buffers(self) -> tuple[Held, Held]:
        """Return keys and values with the room for more, which lie row by row in memory."""
        return self.keys, self.values

    @abstractmethod
    def _parts(self, start: int = 0) -> list[mx.array]:
        """Return keys and values, in quantized form each as three arrays, of the valid tokens from `start` on."""

    @abstractmethod
    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        """Invert `_parts`."""

    @abstractmethod
    def _empty(self) -> Self:
        """Return an empty cache of the same format."""

    def attend_around(self, q: mx.array, k: mx.array, v: mx.array, scale: float, hole: Hole) -> mx.array:
        """Append one row, and return its attention to all entries but those of `hole`."""
        keys, values = self.update_and_fetch(k, v)
        cache = None if isinstance(keys, mx.array) else self
        mask = hole.visible(self.offset)[None, None, None]
        out: mx.array = scaled_dot_product_attention(q, keys, values, cache=cache, scale=scale, mask=mask)
        return out

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        if trim:
            self.trim(trim)

    def copy(self) -> Self:
        """Return an independent copy with the valid tokens only."""
        copied = self._empty()
        copied.offset = self.offset
        if self.keys is not None:
            copied._set_parts([mx.contiguous(part) for part in self._parts()])
        return copied

    def copied_nbytes(self, rows: int) -> int:
        return self.nbytes

    appends = True
    cut_axes: tuple[CutAxis | None, ...] = (KV_HEADS, KV_HEADS)

    def _row_shapes(self, heads: int, dim: int) -> list[Shape]:
        """Return the shapes of a token in `_parts`, for keys of `heads` and `dim`."""
        return [(heads, dim)] * 2

    def backup_arrays(self, start: int, end: int | None = None) -> list[mx.array]:
        count = None if end is None else end - start
        return [mx.contiguous(part[:, :, :count]) for part in self._parts(start)]

    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> Self:
        try:
            joined = zip(*states, strict=True)
            arrays = [one[0] if len(one) == 1 else mx.concatenate(list(one), axis=2) for one in joined]
        except ValueError as error:
            raise ProtocolError(f"the parts of a backup of keys and values do not fit together: {error}") from error
        rows: list[Shape] = [(a.shape[1], a.shape[-1]) for a in arrays if a.ndim == 4]
        expected = rows if self.row is None else self._row_shapes(*self.row)
        if [a.shape for a in arrays] != [(1, heads, length, dim) for heads, dim in expected]:
            found = [a.shape for a in arrays]
            raise ProtocolError(f"a backup of keys and values has shapes {found} for {length} tokens of {expected}")
        filled = self._empty()
        filled._set_parts(arrays)
        filled.offset = length
        return filled


class PlainKV(KVRows, KVCache):
    """Keys and values in the type of the model, `[1, kv_heads, room, dim]`."""

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None else [self.keys, self.values]

    def _parts(self, start: int = 0) -> list[mx.array]:
        return [part[:, :, start:] if start else part for part in self.keys_and_values()]

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        if len(parts) != 2:
            raise ProtocolError(f"{len(parts)} arrays of keys and values, expected 2")
        self.keys, self.values = parts

    def _empty(self) -> PlainKV:
        return PlainKV()


class QuantizedKV(KVRows, QuantizedKVCache):
    """Keys and values in 4 or 8 bits, each as packed values, scales and biases."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values, and return all of them: plain on CUDA, whose products refuse parts of a buffer."""
        fetched = super().update_and_fetch(keys, values)
        if this_device().backend != "cuda":
            return fetched
        size, bits = self.group_size, self.bits
        k, v = (mx.dequantize(w, scales, biases, size, bits) for w, scales, biases in fetched)
        return k, v

    def _attention(
        self, q: mx.array, keys: Any, values: Any, offset: int, scale: float, queries: int | None
    ) -> mx.array:
        if isinstance(keys, mx.array):
            return tiled_attention(q, keys, values, offset, scale, queries)
        width, held = q.shape[2], (keys, values)
        tile = _queries_at_once(q, offset + width)
        tile = tile if queries is None else queries
        outputs = []
        for start in range(0, width, tile):
            own = q[:, :, start : start + tile]
            seen = offset + start + own.shape[2]
            keys, values = (tuple(part[:, :, :seen] for part in parts) for parts in held)
            # mlx-lm's annotation lacks the string.
            mask: Any = "causal" if own.shape[2] > 1 else None
            outputs.append(scaled_dot_product_attention(own, keys, values, cache=self, scale=scale, mask=mask))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)

    def _window(self, q: mx.array, scale: float) -> mx.array:
        own = KVFormat(self.bits, self.group_size)
        return window_attention(q, tuple(self.keys), tuple(self.values), self.offset, scale, own)

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None else [*self.keys, *self.values]

    def _parts(self, start: int = 0) -> list[mx.array]:
        keys, values = self.keys_and_values()
        return [part[:, :, start:] if start else part for part in (*keys, *values)]

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        if len(parts) != 6:
            raise ProtocolError(f"{len(parts)} arrays of quantized keys and values, expected 6")
        self.keys, self.values = tuple(parts[:3]), tuple(parts[3:])

    def _empty(self) -> QuantizedKV:
        return QuantizedKV(group_size=self.group_size, bits=self.bits)

    cut_axes = (KV_HEADS,) * 6

    def _row_shapes(self, heads: int, dim: int) -> list[Shape]:
        groups = heads, dim // self.group_size
        return [(heads, dim * self.bits // 32), groups, groups] * 2


def _heads(parts: Any, own: slice) -> Any:
    """Return the heads `own` of fetched keys or values, an array or the three of a quantized one."""
    return parts[:, own] if isinstance(parts, mx.array) else tuple(part[:, own] for part in parts)


def new_kv(kv_format: KVFormat) -> KVRows:
    """Return an empty cache of a format."""
    if kv_format.bits is None:
        return PlainKV()
    return QuantizedKV(group_size=kv_format.group_size, bits=kv_format.bits)


TRIAL_KEYS = 2048
"""Keys of the trial of the kernel for windows, few enough to take part of a second."""


def window_sides(heads: int, rows: tuple[int, int], dtype: mx.Dtype, kv_format: KVFormat) -> tuple[Rows, Rows]:
    """Return the attention of windows of queries `[width, heads * dim]` by the kernel and by MLX, for a trial.

    Both attend to the same TRIAL_KEYS keys of `rows`, the number of their heads and their width.
    """
    cache, (kv_heads, dim) = new_kv(kv_format), rows
    k, v = (mx.random.normal((1, kv_heads, TRIAL_KEYS, dim), dtype, key=mx.random.key(i)) for i in range(2))
    keys, values = cache.update_and_fetch(k, v)
    mx.eval(cache.arrays())

    def attend(attention: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        q = (32 * x).reshape(-1, heads, dim).transpose(1, 0, 2)[None]  # a trial's rows are small
        return attention(q)[0].transpose(1, 0, 2).reshape(x.shape)

    def mlx(q: mx.array) -> mx.array:
        return cache._attention(q, keys, values, TRIAL_KEYS - q.shape[2], dim**-0.5, None)

    return partial(attend, lambda q: cache._window(q, dim**-0.5)), partial(attend, mlx)


def _queries_at_once(q: mx.array, tokens: int) -> int:
    """Return how many queries of `q [1, heads, width, dim]` have scores of `tokens` tokens within SCORE_BYTES."""
    return max(1, SCORE_BYTES // (q.shape[1] * tokens * q.itemsize))


def tiled_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    offset: int,
    scale: float,
    queries: int | None = None,
) -> mx.array:
    """Return the causal attention of `q [1, heads, width, dim]` at `offset`, in tiles of queries.

    Where MLX has no fused kernel it holds the scores of all queries at once; a tile's stay below `SCORE_BYTES`.
    A tile has at most `queries` queries, where given. The same keys then get the same kernel in any cache.
    """
    width = q.shape[2]
    if queries is not None and this_device().token_major_exact:
        keys, values = _token_major(keys), _token_major(values)
    tile = width if fuses_prompts(width) else _queries_at_once(q, offset + width)
    tile = tile if queries is None else min(tile, queries)
    outputs = []
    for start in range(0, width, tile):
        stop = min(start + tile, width)
        seen = offset + stop
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                q[:, :, start:stop],
                keys[:, :, :seen],
                values[:, :, :seen],
                scale=scale,
                mask="causal" if stop - start > 1 else None,
            )
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _token_major(held: mx.array) -> mx.array:
    """Return `held [1, heads, tokens, dim]` with the heads of a token next to each other in memory.

    For one query, MLX's CUDA backend takes cuDNN if 256 keys or more are a slice of a buffer for a multiple of 256
    tokens. Otherwise it takes its own kernel. The buffer depends on the sequence's history. This layout is never such
    a slice.
    """
    return mx.contiguous(held.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


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
        return self.append(mx.concatenate([keys, values]))

    def attend_pair(self, q: mx.array, new: mx.array, scale: float, windows: Collection[int] = ()) -> mx.array:
        offset = self.offset
        keys, values = self.append(new)
        if takes_window(windows, new.shape[2], self.offset):
            return self._window(q, scale)
        if new.shape[2] == 1:
            return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale)
        return tiled_attention(q, keys, values, offset, scale)

    def _buffers(self) -> tuple[Held, Held]:
        assert self.pair is not None
        return self.pair[:1], self.pair[1:]

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
