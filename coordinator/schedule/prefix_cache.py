"""The index of prefix entries: which prefixes the stages keep, and which to keep next."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.capacity import Capacity

SMALLEST_ENTRY = 128
"""Tokens. Shorter prefixes are not kept: to prefill them costs less than the memory of every layer's GDN state."""

BLOCK = 32
"""Tokens. Entries inside a prompt end at multiples of this, so prompts that differ in their last words share one."""

RECENT_PROMPTS = 64
"""Prompts. The index compares new prompts with this many earlier ones, to find shared beginnings."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """The state after `tokens`. `nbytes` is its size on the stage where it is largest."""

    number: int
    tokens: Tokens
    nbytes: int


class PrefixCache:
    """Entries by number, least recently used first. `capacity.prefix_bytes` bounds them on the smallest stage."""

    def __init__(self) -> None:
        self.capacity = Capacity(sequences=0, kv_tokens=0, prefix_bytes=0)
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self._recent: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)
        self._next = 0

    def reset(self, capacity: Capacity) -> None:
        """Drop all entries: the stages of a new plan hold none."""
        self.capacity = capacity
        self.entries.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries on the stage with the least memory."""
        return sum(entry.nbytes for entry in self.entries.values())

    def find_entry(self, prompt: Sequence[int]) -> Entry | None:
        """Return the longest entry that is a proper prefix of `prompt`, and mark it as the most recently used."""
        best: Entry | None = None
        for entry in self.entries.values():
            length = len(entry.tokens)
            longer = best is None or length > len(best.tokens)
            if longer and length < len(prompt) and tuple(prompt[:length]) == entry.tokens:
                best = entry
        if best is not None:
            self.entries.move_to_end(best.number)
        return best

    def boundaries(self, prompt: Tokens, start: int, turn: int = 0) -> list[int]:
        """Return the positions after `start` to save, the last one `turn` or a whole block. Remember the prompt."""
        if not self._fits(SMALLEST_ENTRY):
            return []
        end = turn or (len(prompt) - 1) // BLOCK * BLOCK
        shared = {common_length(prompt, seen) // BLOCK * BLOCK for seen in self._recent}
        points = {end, *(p for p in shared if start + BLOCK <= p < end)}
        if prompt not in self._recent:
            self._recent.append(prompt)
        held = {len(e.tokens) for e in self.entries.values() if prompt[: len(e.tokens)] == e.tokens}
        inside = (p for p in points - held if start < p < len(prompt))
        return sorted(p for p in inside if self._fits(p))

    def _fits(self, tokens: int) -> bool:
        """Return whether an entry of `tokens` tokens is long enough and fits into the budget."""
        nbytes = self.capacity.entry_bytes(tokens)
        return tokens >= SMALLEST_ENTRY and nbytes <= self.capacity.prefix_bytes

    def add_entry(self, tokens: Tokens) -> tuple[Entry | None, list[int]]:
        """Add an entry; return it and the numbers of those dropped. There is none if it exists or is too large."""
        known = any(entry.tokens == tokens for entry in self.entries.values())
        if known or not self._fits(len(tokens)):
            return None, []
        nbytes = self.capacity.entry_bytes(len(tokens))
        dropped = []
        while self.nbytes + nbytes > self.capacity.prefix_bytes:
            dropped.append(self.entries.popitem(last=False)[0])
        entry = Entry(self._next, tokens, nbytes)
        self._next += 1
        self.entries[entry.number] = entry
        return entry, dropped


def common_length(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common prefix. The search compares whole slices, which is fast in C."""
    most = min(len(a), len(b))
    return bisect_left(range(1, most + 1), True, key=lambda n: a[:n] != b[:n])
