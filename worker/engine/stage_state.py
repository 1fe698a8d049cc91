"""The state of one stage, which headers and signals change: sequences, prefixes, backups, relayed tokens.

The header is authoritative: two stages that process the same frames hold the same sequences, for any signals between
them.

The last of several stages relays tokens to the first, so that plain decoding runs ahead of the coordinator. Each frame
with a segment that asks for it makes one message, in the order of the frames. So a frame that continues never waits for
tokens behind those of a later frame.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx

from proto import cluster_pb2 as pb
from proto.errors import ProtocolError, StaleEpochError
from proto.frame import (
    Admit,
    BackUp,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    Op,
    Outcome,
    RestoreBackup,
    RestorePrefix,
    SavePrefix,
    Segment,
)
from proto.images import without_images
from proto.wire import MAX_INT
from worker.cache.sequence_cache import Border, LastStageState, PrefixEntry, SequenceCache, copies_of
from worker.engine.prefix_disk import StagePrefixes
from worker.engine.stage_backups import ReceivedBackup, StageBackups
from worker.model.stage import StageForward
from worker.model.verifier import Verifier


def relayed_tokens(out: Frame) -> Frame | None:
    """Return the message for the first stage about a frame that leaves the last one, or None if none is asked for.

    It is a frame with outcomes alone. A cancelled outcome has no token, and the segment that continues it has no row.
    """
    pairs = zip(out.segments, out.outcomes, strict=True)
    found = [
        Outcome(o.seq_id, o.window, o.accepted_length, o.token, cancelled=o.token is None)
        for segment, o in pairs
        if segment.relay
    ]
    return Frame(out.epoch, out.number, outcomes=tuple(found)) if found else None


class RelayedTokens:
    """The newest relayed token of each sequence, on the first stage."""

    def __init__(self, epoch: int, vocab: int) -> None:
        self.epoch = epoch
        self.vocab = vocab
        self.newest: dict[int, Outcome] = {}

    def receive_tokens(self, message: Frame, admitted: Collection[int]) -> None:
        """Keep the tokens for the sequences in `admitted`. Raises StaleEpochError and ProtocolError."""
        if message.epoch != self.epoch:
            raise StaleEpochError(f"tokens of epoch {message.epoch}, this stage is in {self.epoch}")
        if message.ops or message.segments or message.dtype:
            raise ProtocolError("a message of relayed tokens has more than outcomes")
        for outcome in message.outcomes:
            if (outcome.token is None) != outcome.cancelled:
                raise ProtocolError(f"a relayed outcome of {outcome.seq_id} has no token")
            if (outcome.token or 0) >= self.vocab:
                raise ProtocolError(f"token {outcome.token}: the vocabulary has {self.vocab}")
            if outcome.seq_id in admitted:
                self.newest[outcome.seq_id] = outcome

    def lacks(self, frame: Frame) -> bool:
        """Return whether a segment of `frame` continues with a token that has not arrived."""
        return frame.continues and any(
            segment.continues and self._outcome(segment) is None for segment in frame.segments
        )

    def token_of(self, segment: Segment) -> int | None:
        """Return the token of a segment that continues, None after a cancelled window, or raise ProtocolError."""
        outcome = self._outcome(segment)
        if outcome is None:
            raise ProtocolError(f"sequence {segment.seq_id} continues with an unknown token")
        return outcome.token

    def _outcome(self, segment: Segment) -> Outcome | None:
        outcome = self.newest.get(segment.seq_id)
        return outcome if outcome is not None and outcome.window == segment.window - 1 else None


@dataclass(frozen=True)
class Budget:
    """The limits of a stage: `sequences`, the sum of their capacities in `kv_tokens`, and `prefix_bytes`."""

    sequences: int = MAX_INT
    kv_tokens: int = MAX_INT
    prefix_bytes: int = MAX_INT


UNLIMITED = Budget()


class StageState:
    """The requests that one stage holds in one epoch. Only the last stage has a `verifier`."""

    def __init__(
        self, stage: StageForward, *, epoch: int, first: bool, verifier: Verifier | None, budget: Budget = UNLIMITED
    ) -> None:
        self.stage = stage
        self.group = stage.modules.communicator
        self.epoch = epoch
        self.first = first
        self.verifier = verifier
        self.budget = budget
        self.sequences: dict[int, SequenceCache] = {}
        self.prefixes: dict[int, PrefixEntry] = {}
        self.relayed: RelayedTokens | None = None
        """Tokens that continue windows, on the first of several stages."""
        if first and verifier is None:
            self.relayed = RelayedTokens(epoch, stage.modules.config.vocab_size)
        self.backups = StageBackups(stage.modules.span, stage.modules.config)
        self.disk: StagePrefixes | None = None
        self.frames_done = 0
        self._borders: dict[int, Border] = {}
        """The newest saved or restored prefix of each sequence."""
        self._saved: list[tuple[int, PrefixEntry]] = []
        """Sequences and prefix entries that the present header saves. Their copies are lazy."""

    # ---- the header

    def check_header(self, frame: Frame) -> None:
        """Raise for a frame that is out of order, has two segments of a sequence, or has an invalid token."""
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"frame of epoch {frame.epoch}, this stage is in {self.epoch}")
        if frame.number != self.frames_done:
            raise ProtocolError(f"frame {frame.number} arrived where {self.frames_done} was expected")
        vocab = self.stage.modules.config.vocab_size
        seen: set[int] = set()
        for segment in frame.segments:
            if segment.seq_id in seen:
                raise ProtocolError(f"sequence {segment.seq_id} has two segments in one frame")
            words = segment.tokens if segment.open else without_images(segment.tokens, 0)
            if words and max(words) >= vocab:
                raise ProtocolError(f"token {max(words)}: the vocabulary has {vocab}")
            seen.add(segment.seq_id)

    def apply_operation(self, op: Op) -> None:
        """Carry out one operation of a header. Raises ProtocolError for one that is invalid here."""
        match op:
            case Admit():
                self._check_room(op)
                self.sequences[op.seq_id] = self.stage.new_sequence(op)
                if self.verifier is not None:
                    self.verifier.admit(op)
            case Commit():
                self.sequence_of(op.seq_id).commit_window(op.window, op.accepted_length, in_header=True)
                if self.verifier is not None:
                    self.verifier.commit_window(op)
            case Evict():
                self.sequences.pop(op.seq_id, None)
                self.backups.forget_sequence(op.seq_id)
                self._borders.pop(op.seq_id, None)
                if self.relayed is not None:
                    self.relayed.newest.pop(op.seq_id, None)
                if self.verifier is not None:
                    self.verifier.evict(op.seq_id)
            case SavePrefix():
                self._save(op)
            case RestorePrefix():
                self._restore(op)
            case DropPrefix():
                self.prefixes.pop(op.entry, None)
            case BackUp():
                self.backups.make_backup(op, self.sequence_of(op.seq_id), self._last_state(op))
            case RestoreBackup():
                last = self._last_state(op)
                border = self.backups.restore_backup(op, self.sequence_of(op.seq_id), last)
                if border is not None:
                    self._borders[op.seq_id] = border

    def _last_state(self, op: BackUp | RestoreBackup) -> LastStageState | None:
        return None if self.verifier is None else self.verifier.states.get(op.seq_id)

    def _check_room(self, op: Admit) -> None:
        if op.seq_id in self.sequences:
            raise ProtocolError(f"sequence {op.seq_id} is admitted twice")
        tokens = op.capacity + sum(s.admitted.capacity for s in self.sequences.values())
        if len(self.sequences) >= self.budget.sequences or tokens > self.budget.kv_tokens:
            raise ProtocolError(
                f"sequence {op.seq_id} of {op.capacity} tokens exceeds this stage's budget of "
                f"{self.budget.sequences} sequences and {self.budget.kv_tokens} tokens"
            )

    def _save(self, op: SavePrefix) -> None:
        sequence = self.sequence_of(op.seq_id)
        if sequence.stack.windows:
            raise ProtocolError(f"prefix of sequence {op.seq_id} saved while a window is open")
        last_stage = None if self.verifier is None else self.verifier.save_prefix(op.seq_id)
        border = Border(op.key, sequence.stack.length)
        entry = PrefixEntry(border, copies_of(sequence.layers), last_stage)
        nbytes = entry.nbytes + sum(held.nbytes for held in self.prefixes.values())
        # Before the copy is computed and takes memory.
        if nbytes > self.budget.prefix_bytes:
            raise ProtocolError(
                f"prefix {op.entry} would make {nbytes} bytes of prefix entries, which exceeds this stage's budget of "
                f"{self.budget.prefix_bytes}"
            )
        self.prefixes[op.entry] = entry
        self._saved.append((op.seq_id, entry))
        if self.disk is not None:
            self.disk.save_soon(entry, self._borders.get(op.seq_id))
        self._borders[op.seq_id] = border

    def end_plan(self) -> None:
        """Let the disk keep the prefixes that wait to be written. The engine processes no frame after this."""
        if self.disk is not None:
            self.disk.hold_waiting(self.prefixes.values())

    def start_copies(self, frame: Frame) -> list[PrefixEntry]:
        """Copy the saved prefixes of sequences that `frame` changes: lazy copies keep caches. Return the others."""
        if not self._saved:
            return []
        running = {segment.seq_id for segment in frame.segments}
        mx.async_eval([list(entry.arrays()) for seq_id, entry in self._saved if seq_id in running])
        late = [entry for seq_id, entry in self._saved if seq_id not in running]
        self._saved.clear()
        return late

    def _restore(self, op: RestorePrefix) -> None:
        sequence = self.sequence_of(op.seq_id)
        entry = self.prefixes.get(op.entry)
        if entry is None or sequence.stack.length:
            raise ProtocolError(f"prefix {op.entry} cannot be restored into sequence {op.seq_id}")
        self._borders[op.seq_id] = entry.border
        sequence.layers = copies_of(entry.layers)
        sequence.stack.length = entry.length
        if self.verifier is not None and entry.last_stage is not None:
            self.verifier.restore(op.seq_id, entry.last_stage)

    def sequence_of(self, seq_id: int) -> SequenceCache:
        """Return an admitted sequence. Raises ProtocolError for another one."""
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise ProtocolError(f"sequence {seq_id} is not admitted here") from None

    # ---- signals and messages

    def rollback(self, epoch: int, seq_id: int, window: int, trim: int) -> None:
        """Drop the last `trim` tokens of an open window, by signal, before a header does. Raises ProtocolError."""
        sequence = self.sequences.get(seq_id)
        if epoch != self.epoch or sequence is None:
            return
        for one in sequence.stack.windows:
            if one.number == window:
                commit_early(sequence, window, one.width - trim)
                return

    def cancel(self, epoch: int, seq_id: int) -> None:
        """Stop running the segments of a cancelled sequence. A later header evicts it."""
        sequence = self.sequences.get(seq_id)
        if epoch == self.epoch and sequence is not None:
            sequence.stack.ended = True

    def report_state(self) -> pb.StateReport:
        """Return everything that the stage holds of requests."""
        return pb.StateReport(
            epoch=self.epoch,
            sequences=[
                pb.SequenceReport(
                    seq_id=seq_id,
                    length=s.stack.committed,
                    capacity=s.admitted.capacity,
                    open_windows=[window.number for window in s.stack.windows],
                    bytes=s.nbytes,
                )
                for seq_id, s in sorted(self.sequences.items())
            ],
            prefixes=[
                pb.PrefixReport(entry=entry, length=p.length, bytes=p.nbytes)
                for entry, p in sorted(self.prefixes.items())
            ],
        )

    def receive_tokens(self, message: Frame) -> None:
        """Keep the tokens that the last stage has relayed. Raises ProtocolError on any other stage than the first."""
        if self.relayed is None:
            raise ProtocolError("tokens were relayed to a stage that cannot use them")
        self.relayed.receive_tokens(message, self.sequences)

    def lacks_tokens(self, frame: Frame) -> bool:
        """Return whether `frame` must wait for tokens that the last stage has not relayed yet."""
        return self.relayed is not None and self.relayed.lacks(frame)

    def receive_backup(self, seq_id: int, backup: ReceivedBackup) -> None:
        """Keep a backup that the coordinator has written, until a frame restores it."""
        self.backups.receive_backup(seq_id, backup, self.budget.sequences, self.budget.kv_tokens)


def commit_early(sequence: SequenceCache, window: int, accepted_length: int) -> None:
    """Apply a commit before its header arrives, and start to compute a restored state."""
    result = sequence.commit_window(window, accepted_length, in_header=False)
    if result.cut is not None:
        mx.async_eval(*sequence.arrays())
