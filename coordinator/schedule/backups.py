"""The backups of running sequences: which one is made next, and the states that the coordinator keeps. Plain data.

A plan that ends takes the state of every sequence with it, because its layers move to other workers. The coordinator
keeps a copy of this state, up to some token. The next plan restores it and computes only the tokens after it. Backups
of prompts stay after their sequences, for later prompts that begin with the same tokens. A backup costs the time of its
transfer. The pause after it is a multiple of this time, which is long in a calm cluster and short after a failure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.schedule.sequence import Sequence as GenerationSequence
from proto.backup import LayerState
from proto.frame import BackUp

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
            if not state.appends and not state.rank:  # shares of other members follow the first
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
    """The backups of prompts by tokens, least recently used first, for new prompts after a plan has ended."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Tokens, Backup] = OrderedDict()

    def add_prefix(self, tokens: Tokens, backup: Backup) -> None:
        """Keep a backup of `tokens`."""
        self.kept[tokens] = backup
        self.kept.move_to_end(tokens)
        if len(self.kept) > MAX_PREFIXES:
            self.kept.popitem(last=False)

    def find_longest(self, prompt: Sequence[int]) -> Backup | None:
        """Return the longest backup that is a proper prefix of `prompt`, and mark it as the most recently used."""
        shorter = (tokens for tokens in self.kept if len(tokens) < len(prompt))
        found = [tokens for tokens in shorter if tuple(prompt[: len(tokens)]) == tokens]
        if not found:
            return None
        longest = max(found, key=len)
        self.kept.move_to_end(longest)
        return self.kept[longest]


def total_bytes(backups: Iterable[Backup]) -> int:
    """Return the bytes of all states, each counted once although several backups may share it."""
    return sum({id(s): len(s.data) for one in backups for s in one.states}.values())


MAX_IN_FLIGHT = 4
"""Backups in flight. A backup waits for its frame to pass all stages, and another sequence uses this time."""

BYTES_IN_FLIGHT = 2**26
"""Bytes. A backup above this is the only one in flight: a stage keeps the GDN states of each in memory meanwhile."""

MIN_NEW_TOKENS = 32
"""Tokens. A backup that saves fewer is not made: a stage computes as many in one step."""

NEAR_PREFIX = 128
"""Tokens. Distance to the end of a prefix within which no other backup of the sequence is made: one short chunk."""

CALM_PAUSE = 49.0
"""Pause after a backup, over its time. Backups then take 2 % of the time of a link."""

STORM_PAUSE = 3.0
"""The same after a recent failure. Backups then take 25 %, and a rebuild computes the tokens of a few seconds."""

STORM_SECONDS = 300.0
"""Seconds after a failure for which STORM_PAUSE applies. Back-offs of workers have the same upper bound."""

DEFAULT_BYTES = 2**30
"""Bytes. Memory for backups: two or three sequences of 4,096 tokens of Qwen3.5-27B, which have 420 MB each."""


@dataclass(frozen=True)
class BackupInFlight:
    """The backup of tokens `start` to `tokens` in frame number `frame`. `prefix` is set if others may share them."""

    seq_id: int
    start: int
    tokens: int
    frame: int
    prefix: Tokens | None = None


class Backups:
    """The backups of running sequences, of at most `limit` bytes in total."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self.enabled = True
        """False while the stages run in this process."""
        self.kept: dict[int, Backup] = {}
        self.prefixes = PrefixBackups()
        self.in_flight: dict[int, BackupInFlight] = {}
        """Backups that are being made, by sequence."""
        self.due: int | None = None
        """The sequence whose next segment is sent with a backup."""
        self.ready = False
        """True if a backup may be made now."""
        self.stormy = False
        """True for STORM_SECONDS after a failure."""
        self._newest_bytes = 0  # of the newest transfer
        self._full_from = math.inf
        """The oldest sequence whose backup exceeds `limit`. It and younger ones wait for the end of an older one."""
        self._next_at = 0.0
        self._storm_until = -1.0

    def record_failure(self, now: float) -> None:
        """Make backups more often from now on, because a plan has ended."""
        self._storm_until = now + STORM_SECONDS
        self._next_at = now
        self.in_flight.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all backups."""
        return total_bytes((*self.kept.values(), *self.prefixes.kept.values()))

    def tokens_of(self, seq_id: int) -> int:
        """Return how many tokens of a sequence are backed up."""
        return self.kept.get(seq_id, Backup()).tokens

    def may_begin(self, seq_id: int) -> bool:
        """Return whether a sequence has no backup in flight, and its next backup may fit into `limit`."""
        return seq_id not in self.in_flight and seq_id < self._full_from

    def choose_due(self, running: Iterable[GenerationSequence], now: float) -> None:
        """Set `due` to the sequence with the most tokens to back up, or to None if no backup is due at `now`."""
        self.due, self.stormy = None, now < self._storm_until
        most = 1 if self._newest_bytes > BYTES_IN_FLIGHT else MAX_IN_FLIGHT
        self.ready = self.enabled and len(self.in_flight) < most and now >= self._next_at
        if not self.ready:
            return
        missing = {}
        for s in running:
            if self.may_begin(s.seq_id) and not _near_prefix(s):
                # What the stages hold for certain when its next segment arrives.
                held = len(s.tokens) - 1 if s.decoding else s.scheduled_tokens
                missing[s.seq_id] = held - self.tokens_of(s.seq_id)
        seq_id = max(missing, key=lambda one: missing[one], default=None)
        if seq_id is not None and missing[seq_id] >= MIN_NEW_TOKENS:
            self.due = seq_id

    def start_from_prefix(self, sequence: GenerationSequence) -> None:
        """Let a new sequence begin with the longest backup of a prompt that its own prompt begins with."""
        if (found := self.prefixes.find_longest(sequence.tokens)) is not None:
            self.kept[sequence.seq_id] = found.copy()

    def begin_backup(
        self, seq_id: int, tokens: int, frame: int, prefix: Tokens | None = None
    ) -> BackUp:
        """Return the operation of frame number `frame` that backs up the first `tokens` tokens of a sequence."""
        self.due, self.ready = None, False
        start = self.tokens_of(seq_id)
        self.in_flight[seq_id] = BackupInFlight(seq_id, start, tokens, frame, prefix)
        return BackUp(seq_id, start)

    def returned(self, frame: int) -> BackupInFlight | None:
        """Return the backup that the returned frame number `frame` has made, for the coordinator to read."""
        return next((one for one in self.in_flight.values() if one.frame == frame), None)

    def complete_backup(
        self, made: BackupInFlight, tokens: int, states: Sequence[LayerState]
    ) -> None:
        """Keep a backup that was read, unless it is stale. Above `limit` the youngest sequences lose theirs."""
        if made is not self.in_flight.get(made.seq_id):
            return
        self._newest_bytes = sum(len(state.data) for state in states)
        former = self.kept.get(made.seq_id, Backup())
        if tokens != made.tokens or former.tokens != made.start:
            return  # the states continue a backup that was dropped while they were in flight
        backup = self.kept[made.seq_id] = former.copy()
        backup.add_states(tokens, states)
        if made.prefix is not None:
            self.prefixes.add_prefix(made.prefix, backup.copy())
        while self.nbytes > self.limit:
            if self.prefixes.kept:
                self.prefixes.kept.popitem(last=False)
                continue
            youngest = max(self.kept)
            self._full_from = min(self._full_from, youngest)
            del self.kept[youngest]
            if youngest == made.seq_id and former.tokens:
                self.kept[youngest] = former
                return

    def end_backup(self, made: BackupInFlight, seconds: float, now: float) -> None:
        """Wait in proportion to the `seconds` of the transfer before the next backup, even if it has failed."""
        if made is self.in_flight.get(made.seq_id):
            del self.in_flight[made.seq_id]
            pause = STORM_PAUSE if now < self._storm_until else CALM_PAUSE
            self._next_at = now + pause * seconds

    def drop_backup(self, seq_id: int) -> None:
        """Drop the backup of a sequence that has ended. The others may use its room."""
        if seq_id <= self._full_from:
            self._full_from = math.inf
        self.kept.pop(seq_id, None)
        self.in_flight.pop(seq_id, None)

    def give_up(self, seq_id: int) -> None:
        """Drop a backup that plans do not survive, and those of prompts, which may have the same states."""
        self.drop_backup(seq_id)
        self.prefixes.kept.clear()


def _near_prefix(sequence: GenerationSequence) -> bool:
    """Return whether the next chunk of a prompt ends where a prefix is saved, which is then backed up."""
    boundary = next(iter(sequence.prefix_boundaries), 0)
    return sequence.scheduled_tokens < boundary <= sequence.scheduled_tokens + NEAR_PREFIX
