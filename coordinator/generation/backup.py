"""The backup of one sequence, and the backups of prompts, which outlive their sequences. Plain data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from proto.backup import LayerState

MAX_PREFIXES = 64
"""Prompts. Bound on the comparisons for a new prompt. It equals RECENT_PROMPTS of the prefix cache."""

Tokens = tuple[int, ...]


@dataclass
class Backup:
    """The state of a sequence after its first `tokens` tokens, by layer."""

    tokens: int = 0
    layers: dict[int, list[LayerState]] = field(default_factory=dict)

    def add_states(self, tokens: int, states: Iterable[LayerState]) -> None:
        """Advance the backup to `tokens` tokens."""
        for state in states:
            kept = self.layers.setdefault(state.layer, [])
            if not state.appends:
                kept.clear()
            kept.append(state)
        self.tokens = tokens

    def copy(self) -> Backup:
        """Return a backup that grows independently. Both share the bytes of their present states."""
        return Backup(self.tokens, {layer: [*states] for layer, states in self.layers.items()})

    @property
    def states(self) -> list[LayerState]:
        """The states of all layers, in the order in which they were made."""
        return [state for layer in self.layers.values() for state in layer]


class PrefixBackups:
    """The backups of prompts by their tokens, in order of use, the least recently used first.

    The stages lose their prefix entries when a plan ends. A new sequence whose prompt begins with one of these prompts
    starts from its backup instead.
    """

    def __init__(self, most: int = MAX_PREFIXES) -> None:
        self.most = most
        self.kept: OrderedDict[Tokens, Backup] = OrderedDict()

    def add_prefix(self, tokens: Tokens, backup: Backup) -> None:
        """Keep a backup of `tokens`."""
        self.kept[tokens] = backup
        self.kept.move_to_end(tokens)
        if len(self.kept) > self.most:
            self.drop_oldest()

    def find_longest(self, prompt: Sequence[int]) -> Backup | None:
        """Return the longest backup that is a proper prefix of `prompt`, and mark it as the most recently used."""
        found = [
            tokens
            for tokens in self.kept
            if len(tokens) < len(prompt) and tuple(prompt[: len(tokens)]) == tokens
        ]
        if not found:
            return None
        longest = max(found, key=len)
        self.kept.move_to_end(longest)
        return self.kept[longest]

    def drop_oldest(self) -> None:
        """Drop the backup that was not used for the longest time."""
        self.kept.popitem(last=False)


def total_bytes(backups: Iterable[Backup]) -> int:
    """Return the bytes of all states, each counted once although several backups may share it."""
    return sum({id(s): len(s.data) for one in backups for s in one.states}.values())
