"""The backups of running sequences: which one is made next, and the states that the coordinator keeps. Plain data.

A plan that ends takes the state of every sequence with it, because its layers move to other workers. The coordinator
keeps a copy of this state, up to some token. The next plan restores it and computes only the tokens after it.

A backup costs the time of its transfer. The pause after it is a multiple of this time, which is long in a calm cluster
and short after a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.generation.sequence import Sequence as GenerationSequence
from proto.backup import LayerState
from proto.operation import BackUp

MIN_NEW_TOKENS = 32
"""Tokens. A backup that saves fewer is not made: a stage computes as many in one step."""

CALM_PAUSE = 49.0
"""Pause after a backup, over its time. Backups then take 2 % of the time of a link."""

STORM_PAUSE = 3.0
"""The same after a recent failure. Backups then take 25 %, and a rebuild computes the tokens of a few seconds."""

STORM_SECONDS = 300.0
"""Seconds after a failure for which STORM_PAUSE applies. Back-offs of workers have the same upper bound."""

DEFAULT_BYTES = 2**30
"""Bytes. Memory for backups: two or three sequences of 4,096 tokens of Qwen3.5-27B, which have 420 MB each."""


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

    @property
    def states(self) -> list[LayerState]:
        """The states of all layers, in the order in which they were made."""
        return [state for layer in self.layers.values() for state in layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(len(state.data) for state in self.states)


@dataclass(frozen=True)
class BackupInFlight:
    """The backup of the first `tokens` tokens of a sequence, which frame number `frame` makes."""

    seq_id: int
    tokens: int
    frame: int


class Backups:
    """The backups of running sequences, of at most `limit` bytes in total. At most one is being made."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self.enabled = True
        """False while the stages run in this process."""
        self.kept: dict[int, Backup] = {}
        self.in_flight: BackupInFlight | None = None
        self.due: int | None = None
        """The sequence whose next segment is sent with a backup."""
        self.stormy = False
        """True for STORM_SECONDS after a failure."""
        self._next_at = 0.0
        self._storm_until = -1.0

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
        backup = self.kept.get(seq_id)
        return 0 if backup is None else backup.tokens

    def choose_due(self, running: Iterable[GenerationSequence], now: float) -> None:
        """Set `due` to the sequence with the most tokens to back up, or to None if no backup is due at `now`."""
        self.due, self.stormy = None, now < self._storm_until
        if not self.enabled or self.in_flight is not None or now < self._next_at:
            return
        missing = {s.seq_id: _held_tokens(s) - self.tokens_of(s.seq_id) for s in running}
        seq_id = max(missing, key=lambda one: missing[one], default=None)
        if seq_id is not None and missing[seq_id] >= MIN_NEW_TOKENS:
            self.due = seq_id

    def begin_backup(self, seq_id: int, tokens: int, frame: int) -> BackUp:
        """Return the operation that backs up the first `tokens` tokens of a sequence in frame number `frame`."""
        self.due, self.in_flight = None, BackupInFlight(seq_id, tokens, frame)
        return BackUp(seq_id, self.tokens_of(seq_id))

    def returned(self, frame: int) -> BackupInFlight | None:
        """Return the backup that the returned frame number `frame` has made, for the coordinator to read."""
        found = self.in_flight
        return found if found is not None and found.frame == frame else None

    def complete_backup(
        self, made: BackupInFlight, tokens: int, states: Sequence[LayerState]
    ) -> None:
        """Keep the `states` of a backup that was read, unless its plan or its sequence has ended since."""
        if made is not self.in_flight:
            return
        if tokens == made.tokens:
            self.kept.setdefault(made.seq_id, Backup()).add_states(tokens, states)
        if self.nbytes > self.limit:
            del self.kept[max(self.kept)]  # the youngest sequence is the cheapest to compute again

    def end_backup(self, made: BackupInFlight, seconds: float, now: float) -> None:
        """Wait in proportion to the `seconds` of the transfer before the next backup, even if it has failed."""
        if made is self.in_flight:
            self.in_flight = None
            pause = STORM_PAUSE if now < self._storm_until else CALM_PAUSE
            self._next_at = now + pause * seconds

    def drop_backup(self, seq_id: int) -> None:
        """Drop the backup of a sequence that has ended."""
        self.kept.pop(seq_id, None)
        if self.in_flight is not None and self.in_flight.seq_id == seq_id:
            self.in_flight = None


def _held_tokens(sequence: GenerationSequence) -> int:
    """Return how many tokens of a sequence the stages hold for certain when its next segment arrives."""
    if sequence.decoding:
        return len(sequence.tokens) - 1
    return sequence.scheduled_tokens
