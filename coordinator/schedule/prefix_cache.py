"""The index of prefix entries: which prefixes the stages keep, and which to keep next.

Tokens are compared by the chained keys of their blocks, so the cost of a prompt does not grow with what is kept.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.capacity import Capacity

SMALLEST_ENTRY = 128
"""Tokens. Shorter prefixes are not kept: to prefill them costs less than the memory of every layer's GDN state."""

KEY_BYTES = 16
"""Bytes of a block's key. With 128 bits two texts never have one key by chance."""

BLOCK = 32
"""Tokens. Entries inside a prompt end at multiples of this, so prompts that differ in their last words share one."""

RECENT_PROMPTS = 64
"""Prompts. The index compares new prompts with this many earlier ones, to find shared beginnings."""

PARTIAL_STEP = 2048
"""Tokens. Least distance of partial entries from each other and from the end of their prompt."""

Tokens = Sequence[int]

Place = tuple[bytes, tuple[int, ...]]
"""The end of a prefix: the key of its last whole block, and the tokens after this block."""


def block_keys(tokens: Tokens, known: bytes = b"") -> bytes:
    """Return the keys of the whole blocks of `tokens`, KEY_BYTES each. Only blocks after those of `known` are hashed.

    The key of a block names all tokens up to its end, because it is a hash of the key before it and of its tokens.
    """
    end, done = len(tokens) // BLOCK, len(known) // KEY_BYTES
    if done >= end:
        return known[: end * KEY_BYTES]
    data, key, keys = array("I", tokens[done * BLOCK : end * BLOCK]), known[-KEY_BYTES:], [known]
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK].tobytes()
        key = hashlib.blake2b(key + block, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return b"".join(keys)


def _key_at(keys: bytes, blocks: int) -> bytes:
    """Return the key of the first `blocks` blocks, empty for none."""
    return keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES] if blocks else b""


def _shared_blocks(a: bytes, b: bytes) -> int:
    """Return how many first blocks two prompts with the keys `a` and `b` share."""
    most = min(len(a), len(b)) // KEY_BYTES
    return bisect_left(range(1, most + 1), True, key=lambda n: _key_at(a, n) != _key_at(b, n))


def place_of(tokens: Tokens, length: int, keys: bytes) -> Place:
    """Return the place of the first `length` of `tokens`, whose blocks have `keys`."""
    blocks = length // BLOCK
    return _key_at(keys, blocks), tuple(tokens[blocks * BLOCK : length])


@dataclass(frozen=True)
class Entry:
    """The state after `tokens` tokens, which end at `place`. `nbytes` is its size on the stage where it is largest.

    A `partial` entry lies inside a prompt or an answer that was left or goes on. A later entry of it replaces this one.
    """

    number: int
    tokens: int
    nbytes: int
    place: Place
    partial: bool = False


class PrefixCache:
    """Entries by number, least recently used first. `capacity.prefix_bytes` bounds them on the smallest stage.

    Methods take the tokens of a text and its `block_keys`, as far as they are known.
    """

    def __init__(self) -> None:
        self.capacity = Capacity(sequences=0, kv_tokens=0, prefix_bytes=0)
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.nbytes = 0
        """Bytes of all entries on the stage with the least memory."""
        self._ends: dict[bytes, dict[tuple[int, ...], int]] = {}
        """Numbers of entries by both parts of their places."""
        self._recent: deque[bytes] = deque(maxlen=RECENT_PROMPTS)
        self._next = 0

    def reset(self, capacity: Capacity) -> None:
        """Drop all entries: the stages of a new plan hold none."""
        self.capacity = capacity
        self.entries.clear()
        self._ends.clear()
        self.nbytes = 0

    def find_entry(self, prompt: Tokens, keys: bytes = b"") -> Entry | None:
        """Return the longest entry that is a proper prefix of `prompt`, and mark it as the most recently used."""
        keys = block_keys(prompt, keys)
        for blocks in range(len(keys) // KEY_BYTES, -1, -1):
            ends, start = self._ends.get(_key_at(keys, blocks)), blocks * BLOCK
            if ends is None:
                continue
            for count in range(min(BLOCK, len(prompt) - start) - 1, -1, -1):
                number = ends.get(tuple(prompt[start : start + count]))
                if number is not None:
                    self.entries.move_to_end(number)
                    return self.entries[number]
        return None

    def boundaries(self, prompt: Tokens, start: int, turn: int = 0, keys: bytes = b"") -> list[int]:
        """Return the positions after `start` to save, the last one `turn` or a whole block. Remember the prompt."""
        end = turn or (len(prompt) - 1) // BLOCK * BLOCK
        if start >= end or not self.fits(SMALLEST_ENTRY):
            return []
        keys = block_keys(prompt, keys)
        shared = {_shared_blocks(keys, seen) * BLOCK for seen in self._recent}
        points = {end, *(p for p in shared if start + BLOCK <= p < end)}
        if keys not in self._recent:
            self._recent.append(keys)
        inside = (p for p in points if start < p < len(prompt) and self.fits(p))
        return sorted(p for p in inside if not self._has_entry(place_of(prompt, p, keys)))

    def is_partial_due(self, start: int, saved: int, end: int) -> bool:
        """Return whether a prompt of `end` tokens with an entry of `saved` tokens gets a partial one of `start` tokens.

        The distance grows by half of the length, so all copies of a prompt together are three times as long as it.
        """
        return start - saved >= max(PARTIAL_STEP, saved // 2) and end - start >= PARTIAL_STEP

    def fits(self, tokens: int) -> bool:
        """Return whether an entry of `tokens` tokens is long enough and fits into the budget."""
        nbytes = self.capacity.entry_bytes(tokens)
        return tokens >= SMALLEST_ENTRY and nbytes <= self.capacity.prefix_bytes

    def add_entry(
        self,
        tokens: Tokens,
        keys: bytes = b"",
        *,
        partial: bool = False,
        replaced: int | None = None,
        evict: bool = True,
    ) -> tuple[Entry | None, list[int]]:
        """Add an entry in the place of the entry `replaced`. Return it and the numbers of those dropped.

        There is none if it exists or is too large, or if others would have to go and `evict` is false.
        """
        place = place_of(tokens, len(tokens), block_keys(tokens, keys))
        nbytes, dropped = self.capacity.entry_bytes(len(tokens)), list[int]()
        former = None if replaced is None else self.entries.get(replaced)
        freed = 0 if former is None else former.nbytes
        full = self.nbytes - freed + nbytes > self.capacity.prefix_bytes
        if self._has_entry(place) or not self.fits(len(tokens)) or (full and not evict):
            return None, []
        if former is not None:
            self.entries.move_to_end(former.number, last=False)
            dropped.append(self._drop_first())
        while self.nbytes + nbytes > self.capacity.prefix_bytes:
            dropped.append(self._drop_first())
        entry = Entry(self._next, len(tokens), nbytes, place, partial)
        self._next += 1
        self.entries[entry.number] = entry
        self._ends.setdefault(place[0], {})[place[1]] = entry.number
        self.nbytes += nbytes
        return entry, dropped

    def _has_entry(self, place: Place) -> bool:
        return place[1] in self._ends.get(place[0], ())

    def _drop_first(self) -> int:
        """Drop the entry that was not used for the longest time, and return its number."""
        number, entry = self.entries.popitem(last=False)
        self.nbytes -= entry.nbytes
        block, rest = entry.place
        del self._ends[block][rest]
        if not self._ends[block]:
            del self._ends[block]
        return number
