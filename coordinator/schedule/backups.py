"""The backups of running sequences: which one is made next, and the states that the coordinator keeps. Plain data.

A plan that ends takes the state of every sequence with it, because its layers move to other workers. The coordinator
keeps a copy of this state, up to some token. The next plan restores it and computes only the tokens after it. A backup
costs the time of its transfer. The pause after it is a multiple of this time, which is long in a calm cluster and short
after a failure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from coordinator.schedule.sequence import Sequence as GenerationSequence
from proto.backup import LayerState
from proto.frame import BackUp


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

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(len(state.data) for state in self.states)


MIN_NEW_TOKENS = 32
"""Tokens. A backup that saves fewer is not made: a stage computes as many in one step."""

SPARED_SECONDS = 1.0
"""Seconds of an answer without a backup, in a calm cluster. On two H200s a prompt of 2,048 tokens took 140 ms with a
backup, of which 45 were its own."""

FIRST_PAUSE = 9.0
"""Age of an answer at its first backup in a calm cluster, over the expected time of that backup. A prompt of 16,000
tokens on two H200s takes 1 s, and its backup .7 s."""

CALM_PAUSE = 49.0
"""Pause after a backup, over its time. Backups then take 2 % of the time of a link."""

STORM_PAUSE = 3.0
"""The same after a recent failure. Backups then take 25 %, and a rebuild computes the tokens of a few seconds."""

STORM_SECONDS = 300.0
"""Seconds after a failure for which STORM_PAUSE applies. Back-offs of workers have the same upper bound."""

HOLD_SECONDS = 15.0
"""Seconds for which answers pause at most before a planned change, until all of their states is backed up."""

MEMORY_SHARE = 1 / 16
"""Default memory for backups as a share of the machine's: 4 GB of 64 GB hold ten sequences of 4,096 tokens of
Qwen3.5-27B, which have 420 MB each."""


def default_limit() -> int:
    """Return the bytes that backups may take on this machine unless the user says otherwise."""
    return int(psutil.virtual_memory().total * MEMORY_SHARE)


@dataclass(frozen=True)
class BackupInFlight:
    """The backup of tokens `start` to `tokens` in frame number `frame`."""

    seq_id: int
    start: int
    tokens: int
    frame: int


class Backups:
    """The backups of running sequences, of at most `limit` bytes in total."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = default_limit() if limit is None else limit
        self.enabled = True
        """False while the stages run in this process."""
        self.kept: dict[int, Backup] = {}
        self.in_flight: BackupInFlight | None = None
        """The backup that is being made. Stages keep its GDN states in memory meanwhile, so it is the only one."""
        self.due: int | None = None
        """The sequence whose next segment is sent with a backup."""
        self.stormy = False
        """True for STORM_SECONDS after a failure."""
        self._full_from = math.inf
        """The oldest sequence whose backup exceeds `limit`. It and younger ones wait for the end of an older one."""
        self._too_large: set[int] = set()
        """Sequences whose backup alone exceeds `limit`. They have none, and leave the room to others."""
        self._next_at = 0.0
        self._sizes = 0.0, 0.0
        """Bytes of the newest backup that every backup has, and those for each token."""
        self._seconds_per_byte = 0.0
        """Seconds of the newest transfer for each of its bytes."""
        self._storm_until = -1.0
        self._hands_over = False
        self._holding_since: float | None = None
        """Seconds. Begin of the pause, in which no segment is in flight; None unless `holding`."""

    # ---- hand-over to the next plan

    @property
    def holding(self) -> bool:
        """True while nothing more is sent, so that all states are backed up for the next plan."""
        return self._holding_since is not None

    def hand_over(self, *, begin: bool) -> None:
        """Begin to back up the whole states of all sequences, because the plan changes, or end that."""
        self._hands_over, self._holding_since = begin, None

    def _choose_hold(self, running: Iterable[GenerationSequence], now: float) -> None:
        """Hold if states are handed over and there is room for all. Their sequences are computed meanwhile if not."""
        if not self._hands_over or not self.enabled or not all(self._has_room(s.seq_id) for s in running):
            self._holding_since = None
        elif self._holding_since is None or any(s.is_in_flight for s in running):
            self._holding_since = now

    def next_to_hand_over(self, running: Iterable[GenerationSequence]) -> tuple[GenerationSequence, int] | None:
        """Return a sequence whose state is not backed up, and its tokens after the frames that are sent, or None.

        A backup needs a moment without open windows. It may follow chunks of a prompt that are in flight.
        """
        for s in running if self.holding and self.in_flight is None else ():
            held = s.scheduled_tokens if s.computed_tokens < s.prefill_tokens else s.held_tokens
            if s.admitted and not s.windows_in_flight and held > self.tokens_of(s.seq_id):
                return s, held
        return None

    def is_handed_over(self, running: Collection[GenerationSequence], now: float) -> bool:
        """Return whether the plan may change without tokens that are computed again, or HOLD_SECONDS are over."""
        if self._holding_since is None:
            return False
        under_way = self.in_flight is not None or any(s.is_in_flight for s in running)
        whole = not under_way and self.next_to_hand_over(running) is None
        return whole or now - self._holding_since >= HOLD_SECONDS

    def _has_room(self, seq_id: int) -> bool:
        return seq_id < self._full_from and seq_id not in self._too_large

    # ---- backups

    def record_failure(self, now: float) -> None:
        """Make backups more often from now on, because a plan has ended."""
        self._storm_until = now + STORM_SECONDS
        self._next_at = now
        self.in_flight = None

    @property
    def nbytes(self) -> int:
        """Bytes of all backups."""
        return sum(backup.nbytes for backup in self.kept.values())

    def tokens_of(self, seq_id: int) -> int:
        """Return how many tokens of a sequence are backed up."""
        return self.kept.get(seq_id, Backup()).tokens

    def choose_due(self, running: Collection[GenerationSequence], now: float) -> None:
        """Set `due` to the sequence with the most tokens to back up, or to None if no backup is due at `now`."""
        self.stormy = now < self._storm_until
        self.due = self._most_to_lose(running, now)
        self._choose_hold(running, now)

    def _most_to_lose(self, running: Iterable[GenerationSequence], now: float) -> int | None:
        if not self.enabled or self.in_flight is not None or now < self._next_at:
            return None
        missing = {}
        for s in running:
            # What the stages hold for certain when its next segment arrives.
            held = len(s.tokens) - 1 if s.decoding else s.scheduled_tokens
            spared = max(SPARED_SECONDS, FIRST_PAUSE * self._expected_seconds(held))
            if not self.stormy and now - s.scheduled_at < spared:
                continue
            if self._has_room(s.seq_id):
                missing[s.seq_id] = held - self.tokens_of(s.seq_id)
        seq_id = max(missing, key=lambda one: missing[one], default=None)
        return None if seq_id is None or missing[seq_id] < MIN_NEW_TOKENS else seq_id

    def _expected_seconds(self, tokens: int) -> float:
        """Return the expected seconds of a first backup after `tokens` tokens, 0 before any was made."""
        fixed, per_token = self._sizes
        return (fixed + tokens * per_token) * self._seconds_per_byte

    def begin_backup(self, seq_id: int, tokens: int, frame: int) -> BackUp:
        """Return the operation of frame number `frame` that backs up the first `tokens` tokens of a sequence."""
        self.due = None
        start = self.tokens_of(seq_id)
        self.in_flight = BackupInFlight(seq_id, start, tokens, frame)
        return BackUp(seq_id, start)

    def returned(self, frame: int) -> BackupInFlight | None:
        """Return the backup that the returned frame number `frame` has made, for the coordinator to read."""
        made = self.in_flight
        return made if made is not None and made.frame == frame else None

    def complete_backup(self, made: BackupInFlight, tokens: int, states: Sequence[LayerState]) -> None:
        """Keep a backup that was read, unless it is stale. Above `limit` the youngest sequences lose theirs."""
        if made is not self.in_flight:
            return
        fixed, added = (sum(len(s.data) for s in states if s.appends == a) for a in (False, True))
        self._sizes = fixed, added / max(1, made.tokens - made.start)
        former = self.kept.get(made.seq_id, Backup())
        if tokens != made.tokens or former.tokens != made.start:
            return  # the states continue a backup that was dropped while they were in flight
        backup = self.kept[made.seq_id] = former.copy()
        backup.add_states(tokens, states)
        if backup.nbytes > self.limit:
            self.skip_sequence(made.seq_id)
            return
        while self.nbytes > self.limit:
            youngest = max(self.kept)
            self._full_from = min(self._full_from, youngest)
            del self.kept[youngest]
            if youngest == made.seq_id and former.tokens:
                self.kept[youngest] = former
                return

    def end_backup(self, made: BackupInFlight, seconds: float, now: float) -> None:
        """Wait in proportion to the `seconds` of the transfer before the next backup, even if it has failed."""
        if made is self.in_flight:
            self.in_flight = None
            fixed, per_token = self._sizes
            moved = fixed + per_token * (made.tokens - made.start)
            self._seconds_per_byte = seconds / moved if moved else 0.0
            pause = STORM_PAUSE if now < self._storm_until else CALM_PAUSE
            self._next_at = now + pause * seconds

    def drop_backup(self, seq_id: int) -> None:
        """Drop the backup of a sequence that has ended. The others may use its room."""
        if seq_id <= self._full_from:
            self._full_from = math.inf
        self.kept.pop(seq_id, None)
        self._too_large.discard(seq_id)
        if self.in_flight is not None and self.in_flight.seq_id == seq_id:
            self.in_flight = None

    def skip_sequence(self, seq_id: int) -> None:
        """Back up a sequence no more, because one backup of it exceeds `limit`. The others may use its room."""
        self.kept.pop(seq_id, None)
        self._too_large.add(seq_id)
        self._full_from = math.inf
