"""The caches of mlx-lm behind this project's interface: windows that are cut, copies, backups, several sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mtp.layers.layer import CutAxis, LayerCache
from mtp.mlx_models.slots import FrameLengths, SlotKV, shared_slots
from proto.errors import ProtocolError

Rerun = Callable[[mx.array, Sequence[Any], int], object]
"""A function that runs rows `[rows, hidden]` of a layer again, to advance its caches after a number of tokens."""


def after(length: int) -> KVCache:
    """Return a cache of keys and values that has only the position after `length` tokens."""
    found = KVCache()
    found.offset = length
    return found


def is_trimmed(cache: Any) -> bool:
    """Return whether the tokens of `cache` can be removed from its end, and only add to its state."""
    if type(cache) is CacheList:
        return all(is_trimmed(one) for one in cache.caches)
    return type(cache) in (KVCache, SlotKV)


def _parts(cache: Any) -> list[Any]:
    """Return the caches within a list of caches, or the cache alone."""
    return [part for one in cache.caches for part in _parts(one)] if type(cache) is CacheList else [cache]


def own_copy(cache: Any, copied: Callable[[mx.array], mx.array]) -> Any:
    """Return a copy of `cache` whose arrays are `copied` ones: an item assignment changes an array."""
    found = copy(cache)
    if type(cache) is CacheList:
        found.caches = tuple(own_copy(one, copied) for one in cache.caches)
        return found
    for name, value in vars(cache).items():
        if isinstance(value, mx.array):
            setattr(found, name, copied(value))
        elif isinstance(value, list):
            setattr(found, name, [copied(v) if isinstance(v, mx.array) else v for v in value])
        elif isinstance(value, tuple):
            setattr(found, name, tree_map(lambda v: copied(v) if isinstance(v, mx.array) else v, value))
    return found


def _another(array: mx.array) -> mx.array:
    """Return the same values as another object."""
    return array[...]


class MlxLmCache(LayerCache):
    """The caches that a layer of mlx-lm takes for one sequence: one, several, or none.

    Caches of keys and values are trimmed. Any other is restored from a snapshot before the window, and the accepted
    rows run through the layer again.
    """

    layout = None

    def __init__(self, rerun: Rerun, held: list[Any]) -> None:
        self.rerun, self.held = rerun, held
        self.trims = all(map(is_trimmed, held))
        """True if a rejection only removes tokens."""
        self.length = 0
        """Tokens that the layer has seen."""
        self._tapes: list[tuple[list[Any], mx.array] | None] = []
        """For each open window the caches before it and the rows of the layer, None where trimming is enough."""

    @property
    def appends(self) -> bool:  # type: ignore[override]
        return bool(self.held) and self.trims

    def open_window(self, rows: mx.array, sequence: int) -> None:
        """Prepare for the cut of a window whose rows run next: those of a `sequence` in `rows [n, w, hidden]`."""
        self._tapes.append(None if self.trims else ([own_copy(cache, _another) for cache in self.held], rows[sequence]))

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        if cut is None:
            del self._tapes[:whole]
            return
        tape = self._tapes[whole]
        self._tapes.clear()
        if tape is None:
            self.trim(trim)
            return
        self.length -= trim
        self.held, rows = tape
        if cut:
            self.rerun(rows[:cut], self.held, self.length - cut)

    @property
    def offset(self) -> int:
        """The length, by the name that the MTP head's cache has for it."""
        return self.length

    def trim(self, count: int) -> None:
        """Remove the last `count` tokens of caches that are trimmed."""
        for cache in self.held:
            cache.trim(count)
        self.length -= count

    def copy(self) -> MlxLmCache:
        found = MlxLmCache(self.rerun, [own_copy(_fitted(cache), mx.contiguous) for cache in self.held])
        found.length = self.length
        return found

    def copied_nbytes(self, rows: int) -> int:
        # Keys and values are written in place. Recurrent states are new arrays anyway.
        parts = [part for cache in self.held for part in _parts(cache)]
        return sum(_nbytes(part) for part in parts if isinstance(part, SlotKV) or hasattr(part, "keys"))

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(part) for cache in self.held for part in _parts(cache))

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.held for array in arrays_of(cache)]

    def backup_arrays(self, start: int, end: int | None = None) -> list[mx.array]:
        if self.appends:
            return [
                mx.contiguous(array[..., start : part.offset if end is None else end, :])
                for cache in self.held
                for part in _parts(cache)
                for array in (part.keys, part.values)
            ]
        states = [part.state for cache in self.held for part in _parts(cache)]
        flat: Any = tree_flatten(_marked(states))
        arrays = [value for _, value in flat if isinstance(value, mx.array)]
        text = json.dumps([[name, None if isinstance(value, mx.array) else value] for name, value in flat])
        return [mx.array(np.frombuffer(text.encode(), np.uint8)), *map(mx.contiguous, arrays)]

    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> MlxLmCache:
        parts = [part for cache in self.held for part in _parts(cache)]
        try:
            if self.appends:
                _fill(parts, states, length)
            elif parts:
                _restore(parts, states[-1])
            self.length = length
        except (ValueError, TypeError, KeyError, IndexError, StopIteration) as error:
            raise ProtocolError(f"the backup of a layer of mlx-lm has another form: {error!r:.120}") from error
        return self

    @property
    def cut_axes(self) -> tuple[CutAxis | None, ...]:
        return (None,) * len(self.backup_arrays(0))


_NONE = "none"
"""The mark of a missing array in a state that is flattened."""


def _marked(state: Any) -> Any:
    """Return a state with a mark for each None, which a tree cannot have as a leaf."""
    if isinstance(state, list | tuple):
        return [_marked(one) for one in state]
    return _NONE if state is None else state


def _unmarked(state: Any) -> Any:
    if isinstance(state, list):
        return [_unmarked(one) for one in state]
    return None if isinstance(state, str) and state == _NONE else state


def _fitted(cache: Any) -> Any:
    """Return a cache of keys and values without the room for more tokens, others as they are."""
    if type(cache) is CacheList:
        found = copy(cache)
        found.caches = tuple(_fitted(one) for one in cache.caches)
        return found
    if type(cache) not in (KVCache, SlotKV) or cache.empty():
        return cache
    fitted = type(cache)()
    fitted.keys, fitted.values = cache.keys_and_values()
    fitted.offset = cache.offset
    return fitted


def arrays_of(cache: Any) -> list[mx.array]:
    """Return the arrays of a cache."""
    if type(cache) is SlotKV:
        return cache.arrays()
    if type(cache) is CacheList:
        return [array for part in cache.caches for array in arrays_of(part)]
    found = list(vars(cache).values())
    return [array for array in dict(tree_flatten(found)).values() if isinstance(array, mx.array)]


def _nbytes(part: Any) -> int:
    """Return the bytes of a cache that is no list."""
    return part.nbytes if type(part) is SlotKV else sum(array.nbytes for array in arrays_of(part))


def _fill(parts: Sequence[KVCache], states: Sequence[Sequence[mx.array]], length: int) -> None:
    """Give caches of keys and values the tokens of several backups. Raises ValueError."""
    for index, part in enumerate(parts):
        keys, values = (mx.concatenate([state[2 * index + side] for state in states], axis=2) for side in (0, 1))
        if not keys.ndim == values.ndim == 4 or not keys.shape[2] == values.shape[2] == length:
            raise ValueError(f"{keys.shape} and {values.shape} for {length} tokens")
        part.keys, part.values, part.offset = keys, values, length
    if any(len(state) != 2 * len(parts) for state in states):
        raise ValueError(f"{[len(state) for state in states]} arrays for {len(parts)} caches")


def _restore(parts: Sequence[Any], arrays: Sequence[mx.array]) -> None:
    """Give caches the states of a backup: their structure as JSON, and then their arrays. Raises ValueError."""
    structure = json.loads(bytes(np.array(arrays[0])))
    rest = iter(arrays[1:])
    if any(int(place) > len(structure) for name, _ in structure for place in str(name).split(".")):
        raise ValueError("a place beyond its list")
    flat = [(str(name), next(rest) if value is None else value) for name, value in structure]
    states: Any = _unmarked(tree_unflatten(flat))
    if len(states) != len(parts) or next(rest, None) is not None:
        raise ValueError(f"{len(states)} states for {len(parts)} caches")
    for part, state in zip(parts, states, strict=True):
        fixed = [value for value in (getattr(part, "max_size", None), getattr(part, "keep", None)) if value is not None]
        part.state = tuple(state)
        if fixed != [v for v in (getattr(part, "max_size", None), getattr(part, "keep", None)) if v is not None]:
            raise ValueError("a window of another size")


# ---- several sequences at once


class Ragged:
    """Keys or values of several sequences, `[1, heads, tokens, dim]` each, of different lengths."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self.arrays = arrays


class RaggedMasks:
    """The masks of several sequences."""

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = masks


class RaggedKV:
    """The caches of keys and values of several sequences, each of which has its own length."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = caches

    @property
    def offset(self) -> mx.array:
        """The length of each sequence: int32 `[n]`."""
        return mx.array([cache.offset for cache in self.caches], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Ragged, Ragged]:
        """Append `[n, heads, w, dim]`, and return all keys and values."""
        pairs = [
            cache.update_and_fetch(keys[row : row + 1], values[row : row + 1]) for row, cache in enumerate(self.caches)
        ]
        return Ragged([k for k, _ in pairs]), Ragged([v for _, v in pairs])

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the masks of the next rows, None if no sequence needs one."""
        masks = [cache.make_mask(*args, **kwargs) for cache in self.caches]
        return None if all(mask is None for mask in masks) else RaggedMasks(masks)


class RaggedArrays(ArraysCache):
    """Recurrent states of several sequences, which stand in one array while a layer reads and writes them."""

    def __init__(self, caches: Sequence[ArraysCache]) -> None:
        super().__init__(len(caches[0].cache))
        self.caches = caches

    def __getitem__(self, index: int) -> mx.array | None:
        states = [cache[index] for cache in self.caches]
        return None if states[0] is None else mx.concatenate(states)

    def __setitem__(self, index: int, value: mx.array) -> None:
        for row, cache in enumerate(self.caches):
            cache[index] = value[row : row + 1]


class RaggedList:
    """The lists of caches of several sequences."""

    def __init__(self, caches: Sequence[CacheList], frame: FrameLengths) -> None:
        self.caches = [
            together(group, frame) for group in map(list, zip(*(cache.caches for cache in caches), strict=True))
        ]

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]


def together(caches: Sequence[Any], frame: FrameLengths) -> Any:
    """Return the caches of sequences as the one that a layer takes in `frame`. Raises TypeError for other kinds."""
    if len(caches) == 1:
        return caches[0]
    kind = type(caches[0])
    if kind is SlotKV and (slots := shared_slots(caches, frame)) is not None:
        return slots
    if kind in (KVCache, RotatingKVCache, SlotKV):
        return RaggedKV(caches)
    if kind is ArraysCache:
        return RaggedArrays(caches)
    if kind is CacheList:
        return RaggedList(caches, frame)
    raise TypeError(f"{kind.__name__} has no form for several sequences")


def is_ragged(cache: Any) -> bool:
    """Return whether a cache gives a layer the keys and values of each sequence apart."""
    return any(map(is_ragged, cache.caches)) if type(cache) is RaggedList else type(cache) is RaggedKV


def attend(queries: mx.array, keys: Any, values: Any, cache: Any, *args: Any, **kwargs: Any) -> mx.array:
    """Do what mlx-lm's `scaled_dot_product_attention` does, also for several sequences of different lengths."""
    if not isinstance(keys, Ragged):
        found: mx.array = scaled_dot_product_attention(queries, keys, values, cache, *args, **kwargs)
        return found
    names = ("scale", "mask", "sinks")
    given = dict(zip(names, args, strict=False)) | kwargs
    masks = given.pop("mask", None)
    outputs = []
    for row, (k, v) in enumerate(zip(keys.arrays, values.arrays, strict=True)):
        own = masks.masks[row] if isinstance(masks, RaggedMasks) else masks
        outputs.append(scaled_dot_product_attention(queries[row : row + 1], k, v, cache.caches[row], mask=own, **given))
    return mx.concatenate(outputs)


def let_ragged(modules: Sequence[Any]) -> None:
    """Let the attention of `modules` of mlx-lm take several sequences of different lengths."""
    for module in modules:
        if module is not mlx_caches and hasattr(module, "scaled_dot_product_attention"):
            module.scaled_dot_product_attention = attend
