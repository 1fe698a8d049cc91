"""Which prefixes the stages keep, and what to keep next. Plain data: the stages hold the state, here are the tokens.

An entry is what every stage holds after some tokens: K/V, GDN states, the MTP head's part. It is made, used and
dropped by operations in frame headers, which all stages see in the same order: so each entry is on all of them
or on none.

Entries are made in three places: near the end of a prompt, for the same prompt again and for the next turn of its
chat; where a prompt parts from one seen lately, for the system prompt they share; and at the end of an answer, where
another prompt may go on from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.capacity import Capacity

SMALLEST_ENTRY = 128
"""Tokens below which prefilling again costs less than what an entry takes: the GDN states of every layer."""

BLOCK = 32
"""Entries inside a prompt end at multiples of this, so that prompts that differ in their last words share one."""

RECENT_PROMPTS = 64
"""Prompts remembered to find where the next ones part from them."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """State after `tokens`; `nbytes` on the stage where it is largest."""

    number: int
    tokens: Tokens
    nbytes: int


class PrefixCache:
    """Entries by number, the least recently used first. `budget` is in bytes on the tightest stage."""

    def __init__(self) -> None:
        self.capacity = Capacity(sequences=0, kv_tokens=0, prefix_bytes=0)
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self._recent: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)
        self._next = 0

    def reset(self, capacity: Capacity) -> None:
        """New stages hold nothing yet."""
        self.capacity = capacity
        self.entries.clear()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def find(self, prompt: Sequence[int]) -> Entry | None:
        """The longest entry that leaves at least one token of `prompt` to run; it becomes the most recently used."""
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
        """Where in `prompt`, beyond its first `start` tokens, entries are worth making. Remembers the prompt.

        The last is `turn` where that is known: behind it stands what no later prompt has, such as the opening of the
        answer that a chat's history leaves out.
        """
        if not self._fits(SMALLEST_ENTRY):
            return []
        end = turn or (len(prompt) - 1) // BLOCK * BLOCK
        parted = {common_length(prompt, seen) // BLOCK * BLOCK for seen in self._recent}
        points = {end, *(p for p in parted if start + BLOCK <= p < end)}
        if prompt not in self._recent:
            self._recent.append(prompt)
        held = {len(e.tokens) for e in self.entries.values() if prompt[: len(e.tokens)] == e.tokens}
        return sorted(
            p for p in points if start < p < len(prompt) and p not in held and self._fits(p)
        )

    def _fits(self, tokens: int) -> bool:
        """Whether an entry of so many tokens is worth its place, and has one."""
        return (
            tokens >= SMALLEST_ENTRY
            and self.capacity.entry_bytes(tokens) <= self.capacity.prefix_bytes
        )

    def make(self, tokens: Tokens) -> tuple[Entry | None, list[int]]:
        """Take up an entry for `tokens`; the second value are the numbers of entries to drop for it.

        No entry is made where one is held already, or where it would not fit even alone.
        """
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
    """Length of the longest common prefix, found by comparing whole slices, which C does."""
    most = min(len(a), len(b))
    return bisect_left(range(1, most + 1), True, key=lambda n: a[:n] != b[:n])
