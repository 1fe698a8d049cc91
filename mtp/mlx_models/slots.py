"""Keys and values of several sequences in one array, so that a layer updates and attends all of them at once.

Each sequence has a row, and its own length there. A mask hides what is beyond it. Sequences move into a new array when
they run together again. When one of them runs without the others, each takes its row out, and they wait for more frames
together before they move again: each move copies all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import ref

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

MOST_ROWS = 16
"""Rows of a sequence in a frame. Those of longer chunks of prompts run sequence by sequence, without a mask."""

SPARE = 1.25
"""Bound of the tokens that an array has room for, over those of its sequences, which fill `KVCache.step` more each."""

MOST_WAITED = 16
"""Most frames that the same sequences run together before they move into one array."""


class Lengths:
    """The lengths of several sequences as arrays, which the layers of a frame share."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self._masks: dict[Any, mx.array] = {}
        self._places: dict[Any, mx.array] = {}

    @cached_property
    def array(self) -> mx.array:
        """The lengths, int32 `[n]`."""
        return mx.array(self.lengths, mx.int32)

    def next_places(self, width: int) -> mx.array:
        """Return the places of the next rows of each sequence, int32 `[n, 1, width, 1]`."""
        return (self.array[:, None] + mx.arange(width, dtype=mx.int32)).reshape(-1, 1, width, 1)

    def places(self, shape: tuple[int, ...]) -> mx.array:
        """Return the places of the next rows `[n, heads, width, dim]`."""
        if shape not in self._places:
            self._places[shape] = mx.broadcast_to(self.next_places(shape[2]), shape)
        return self._places[shape]

    def mask(self, width: int, window: int | None) -> mx.array:
        """Return what the next rows see, bool `[n, 1, width, tokens]`."""
        if (width, window) not in self._masks:
            rows, tokens = self.next_places(width), mx.arange(max(self.lengths) + width, dtype=mx.int32)
            mask = rows >= tokens
            self._masks[width, window] = mask if window is None else mask & (rows < tokens + window)
        return self._masks[width, window]


class FrameLengths:
    """The lengths of all groups of sequences within one frame, whose rows are `width` in each sequence."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._found: dict[tuple[int, ...], Lengths] = {}

    def of(self, caches: Sequence[Any]) -> Lengths:
        """Return the lengths of `caches`."""
        lengths = tuple([cache.offset for cache in caches])
        if lengths not in self._found:
            self._found[lengths] = Lengths(lengths)
        return self._found[lengths]


class SlotKV(KVCache):
    """Keys and values of one sequence, in arrays of its own or in a row of those of a group."""

    home: Slots | None = None
    """The group whose arrays have the keys and values."""
    row = 0
    """The row of this sequence in the arrays of `home`."""
    beside: Slots | None = None
    """The sequences beside which this one ran in the last frame, if there were any."""
    waits = 1
    """Frames beside the same sequences before they move into one array."""

    @property
    def keys(self) -> mx.array | None:
        """The keys `[1, heads, room, dim]`."""
        return self._keys if self.home is None else self.home.keys[self.row : self.row + 1]

    @keys.setter
    def keys(self, keys: mx.array | None) -> None:
        self._keys = keys

    @property
    def values(self) -> mx.array | None:
        """The values `[1, heads, room, dim]`."""
        return self._values if self.home is None else self.home.values[self.row : self.row + 1]

    @values.setter
    def values(self, values: mx.array | None) -> None:
        self._values = values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values to arrays of this sequence's own, and return all of them."""
        if self.home is not None:
            self.home.dissolve()
        found: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        return found

    def empty(self) -> bool:
        return self.home is None and self._keys is None

    def arrays(self) -> list[mx.array]:
        """Return the arrays that have the keys and values. Sequences of a group share them."""
        if self.empty():
            return []
        holder: Any = self if self.home is None else self.home
        return [holder.keys, holder.values]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, of shared ones the part of this sequence."""
        return sum(array.nbytes // (1 if self.home is None else array.shape[0]) for array in self.arrays())


class Slots:
    """The keys and values of several sequences in one array each, `[n, heads, room, dim]`, with a row for each."""

    keys: mx.array
    values: mx.array
    frame: FrameLengths

    def __init__(self, caches: Sequence[SlotKV]) -> None:
        self._members = [ref(cache) for cache in caches]
        self.is_filled = False
        self.frames = 0

    @property
    def caches(self) -> list[SlotKV]:
        """The caches of the sequences that are still in use."""
        return [cache for member in self._members if (cache := member()) is not None]

    def has(self, caches: Sequence[SlotKV]) -> bool:
        """Return whether `caches` are all members, in this order."""
        return [member() for member in self._members] == [*caches]

    def move_in(self, caches: Sequence[SlotKV]) -> None:
        """Copy the keys and values of `caches`, all members, into new arrays."""
        room = (max(cache.offset for cache in caches) // KVCache.step + 1) * KVCache.step
        for side in ("keys", "values"):
            parts = [getattr(cache, side)[..., : cache.offset, :] for cache in caches]
            _, heads, _, dim = parts[0].shape
            joined = mx.zeros((len(caches), heads, room, dim), parts[0].dtype)
            for row, part in enumerate(parts):
                joined[row : row + 1, :, : part.shape[2]] = part
            setattr(self, side, joined)
        for row, cache in enumerate(caches):
            cache.home, cache.beside, cache.row = self, self, row
            cache.keys = cache.values = None
        self.is_filled = True

    def dissolve(self) -> None:
        """Give each sequence arrays of its own."""
        for cache in self.caches:
            keys, values = map(mx.contiguous, cache.keys_and_values())
            cache.home = cache.beside = None
            cache.waits = min(2 * cache.waits, MOST_WAITED)
            cache.keys, cache.values = keys, values
            # A sequence that does not run now keeps no view of the shared arrays.
            mx.async_eval(keys, values)

    @property
    def _lengths(self) -> Lengths:
        return self.frame.of(self.caches)

    # ---- what a layer of mlx-lm calls

    @property
    def offset(self) -> mx.array:
        """The length of each sequence: int32 `[n]`."""
        return self._lengths.array

    def make_mask(self, width: int, *, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask of the next rows. Sequences of one length need that of one sequence."""
        lengths = self._lengths
        if len(set(lengths.lengths)) == 1:
            return self.caches[0].make_mask(width, return_array=return_array, window_size=window_size)
        return lengths.mask(width, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[n, heads, w, dim]`, and return all keys and values up to the longest sequence."""
        lengths, width = self._lengths, keys.shape[2]
        end = max(lengths.lengths) + width
        self.keys = mx.put_along_axis(_with_room(self.keys, end), lengths.places(keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(_with_room(self.values, end), lengths.places(values.shape), values, axis=2)
        for cache in self.caches:
            cache.offset += width
        return self.keys[..., :end, :], self.values[..., :end, :]


def _with_room(array: mx.array, tokens: int) -> mx.array:
    """Return `array`, or a copy with room for `tokens`."""
    n, heads, room, dim = array.shape
    if tokens <= room:
        return array
    return mx.concatenate([array, mx.zeros((n, heads, KVCache.step, dim), array.dtype)], axis=2)


def shared_slots(caches: Sequence[SlotKV], frame: FrameLengths) -> Slots | None:
    """Return the group of `caches` if they run in one array in `frame`, None where each runs on its own."""
    found = caches[0].beside
    if found is None or not found.has(caches):
        found, home = Slots(caches), caches[0].home
        for cache in caches:
            cache.beside = found
        # Those that stay where others ended move at once.
        found.frames = MOST_WAITED if home is not None and home.caches == [*caches] else 0
    else:
        found.frames += 1
    if not found.is_filled and found.frames < max(cache.waits for cache in caches):
        return None
    lengths = frame.of(caches).lengths
    total, longest = sum(lengths), len(lengths) * max(lengths)
    fits = longest <= max(SPARE * total, total + len(lengths) * KVCache.step)
    if frame.width > MOST_ROWS or not fits or any(cache.empty() for cache in caches):
        return None
    if not found.is_filled:
        found.move_in(caches)
    found.frame = frame
    return found


def compile_kernels(dtype: mx.Dtype) -> None:
    """Let the device compile the kernel that appends rows, which takes seconds on CUDA."""
    row = mx.zeros((2, 1, 1, 1), dtype)
    mx.eval(mx.put_along_axis(row, Lengths((0, 0)).places(row.shape), row, axis=2))


def slotted(cache: Any) -> Any:
    """Return an empty cache whose keys and values can stand beside those of other sequences."""
    if type(cache) is CacheList:
        return CacheList(*map(slotted, cache.caches))
    return SlotKV() if type(cache) is KVCache else cache
