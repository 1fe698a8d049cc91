"""The engine of one stage, which turns frames into frames: operations, segments, rows, outcomes.

All its code runs on the one thread that uses MLX. The header is authoritative: two engines that process the same frames
hold the same sequences, for any signals between them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import mlx.core as mx

from proto.errors import ProtocolError, StaleEpochError
from proto.frame import (
    Admit,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    Op,
    RestorePrefix,
    SavePrefix,
    Segment,
)
from proto.frame_stamps import FrameStamps, StageStep
from worker.cache.prefix_entry import PrefixEntry
from worker.cache.sequence_cache import SequenceCache, copies_of
from worker.engine.tensor_bytes import from_bytes, plain_view, to_bytes
from worker.model.stage import Run, Stage
from worker.model.verifier import Verifier


@dataclass(frozen=True)
class SequenceReport:
    """The state report of a stage for one sequence."""

    seq_id: int
    committed: int
    capacity: int
    open_windows: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PrefixReport:
    """The state report of a stage for one prefix entry."""

    entry: int
    length: int
    nbytes: int


@dataclass(frozen=True)
class ReportState:
    """The complete state report of a stage, for the status and for tests of cancelled requests."""

    sequences: tuple[SequenceReport, ...]
    prefixes: tuple[PrefixReport, ...]


@dataclass(frozen=True)
class Budget:
    """The limits of a stage: `sequences`, the sum of their capacities in `kv_tokens`, and `prefix_bytes`."""

    sequences: int
    kv_tokens: int
    prefix_bytes: int


class StageEngine:
    """The state of one stage in one epoch. Only the last stage has a `verifier`; the `first` stage embeds tokens."""

    def __init__(
        self,
        stage: Stage,
        *,
        epoch: int,
        first: bool,
        verifier: Verifier | None,
        budget: Budget | None = None,
    ) -> None:
        self.stage = stage
        self.epoch = epoch
        self.first = first
        self.verifier = verifier
        self.budget = budget
        self.sequences: dict[int, SequenceCache] = {}
        self.prefixes: dict[int, PrefixEntry] = {}
        self.frames_done = 0

    # ---- frames and signals

    def process(self, frame: Frame, stamps: FrameStamps | None = None) -> Frame:
        """Apply a frame's operations, run its segments, and return the frame for the next hop.

        The returned frame carries the hidden states, or the outcomes on the last stage. Raises StaleEpochError for
        another epoch, and ProtocolError for a frame that is out of order or invalid here.
        """
        started = time.perf_counter()
        stamps = stamps or FrameStamps(0, StageStep)
        stamps.mark(StageStep.BEGUN)
        self._check(frame)
        for op in frame.ops:
            self._apply(op)
        segments = tuple(self._mark(segment) for segment in frame.segments)
        runs: list[Run] = [(self.sequences[s.seq_id], s) for s in segments if not s.cancelled]
        out = replace(frame, segments=segments, dtype="", shape=(), tensor=b"")
        if runs:
            x = self._rows(frame, segments)
            out = self._run(out, x, runs, stamps)
        elif self.verifier is not None:
            out = replace(out, outcomes=self.verifier.outcomes(segments, {}))
        self.frames_done += 1
        elapsed_us = int((time.perf_counter() - started) * 1e6)
        return replace(out, stage_us=(*frame.stage_us, elapsed_us))

    def rollback(self, epoch: int, seq_id: int, window: int, accepted_length: int) -> None:
        """Apply a rejection that arrived by signal, before the header of the next frame repeats it."""
        sequence = self.sequences.get(seq_id)
        if epoch != self.epoch or sequence is None:
            return
        _commit_early(sequence, window, accepted_length)

    def cancel(self, epoch: int, seq_id: int) -> None:
        """Stop running the segments of a cancelled sequence. A later header evicts it."""
        sequence = self.sequences.get(seq_id)
        if epoch == self.epoch and sequence is not None:
            sequence.stack.end()

    def report_state(self) -> ReportState:
        """Return the state report."""
        return ReportState(
            tuple(
                SequenceReport(
                    seq_id,
                    s.stack.committed,
                    s.admitted.capacity,
                    tuple(w.number for w in s.stack.windows),
                    s.nbytes,
                )
                for seq_id, s in sorted(self.sequences.items())
            ),
            tuple(
                PrefixReport(entry, p.length, p.nbytes)
                for entry, p in sorted(self.prefixes.items())
            ),
        )

    # ---- header

    def _check(self, frame: Frame) -> None:
        """Raise for a frame that is out of order, has two segments of a sequence, or has an invalid token."""
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"frame of epoch {frame.epoch}, this stage is in {self.epoch}")
        if frame.number != self.frames_done:
            raise ProtocolError(
                f"frame {frame.number} arrived where {self.frames_done} was expected"
            )
        vocab = self.stage.modules.config.vocab_size
        seen: set[int] = set()
        for segment in frame.segments:
            if segment.seq_id in seen:
                raise ProtocolError(f"sequence {segment.seq_id} has two segments in one frame")
            if segment.tokens and max(segment.tokens) >= vocab:
                raise ProtocolError(f"token {max(segment.tokens)}: the vocabulary has {vocab}")
            seen.add(segment.seq_id)

    def _apply(self, op: Op) -> None:
        match op:
            case Admit():
                self._check_room(op)
                self.sequences[op.seq_id] = self.stage.new_sequence(op)
                if self.verifier is not None:
                    self.verifier.admit(op)
            case Commit():
                self._sequence(op.seq_id).commit(op.window, op.accepted_length, in_header=True)
            case Evict():
                self.sequences.pop(op.seq_id, None)
                if self.verifier is not None:
                    self.verifier.evict(op.seq_id)
            case SavePrefix():
                self._save(op)
            case RestorePrefix():
                self._restore(op)
            case DropPrefix():
                self.prefixes.pop(op.entry, None)

    def _check_room(self, op: Admit) -> None:
        if op.seq_id in self.sequences:
            raise ProtocolError(f"sequence {op.seq_id} is admitted twice")
        if self.budget is None:
            return
        tokens = op.capacity + sum(s.admitted.capacity for s in self.sequences.values())
        if len(self.sequences) >= self.budget.sequences or tokens > self.budget.kv_tokens:
            raise ProtocolError(
                f"sequence {op.seq_id} of {op.capacity} tokens exceeds this stage's budget of "
                f"{self.budget.sequences} sequences and {self.budget.kv_tokens} tokens"
            )

    def _save(self, op: SavePrefix) -> None:
        sequence = self._sequence(op.seq_id)
        if sequence.stack.windows:
            raise ProtocolError(f"prefix of sequence {op.seq_id} saved while a window is open")
        last_stage = None if self.verifier is None else self.verifier.save(op.seq_id)
        entry = PrefixEntry(sequence.stack.length, copies_of(sequence.layers), last_stage)
        self._check_prefix(op, entry)
        mx.async_eval(*entry.arrays())  # a lazy copy keeps the caches of the sequence in memory
        self.prefixes[op.entry] = entry

    def _check_prefix(self, op: SavePrefix, entry: PrefixEntry) -> None:
        """Raise if the entry exceeds the budget, before the copy is computed and takes memory."""
        if self.budget is None:
            return
        nbytes = entry.nbytes + sum(held.nbytes for held in self.prefixes.values())
        if nbytes > self.budget.prefix_bytes:
            raise ProtocolError(
                f"prefix {op.entry} would make {nbytes} bytes of prefix entries, which exceeds this stage's budget of "
                f"{self.budget.prefix_bytes}"
            )

    def _restore(self, op: RestorePrefix) -> None:
        sequence = self._sequence(op.seq_id)
        entry = self.prefixes.get(op.entry)
        if entry is None or sequence.stack.length:
            raise ProtocolError(f"prefix {op.entry} cannot be restored into sequence {op.seq_id}")
        sequence.layers = copies_of(entry.layers)
        sequence.stack.length = entry.length
        if self.verifier is not None and entry.last_stage is not None:
            self.verifier.restore(op.seq_id, entry.last_stage)

    def _sequence(self, seq_id: int) -> SequenceCache:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise ProtocolError(f"sequence {seq_id} is not admitted here") from None

    def _mark(self, segment: Segment) -> Segment:
        if segment.cancelled or self._sequence(segment.seq_id).stack.stale:
            return replace(segment, cancelled=True)
        return segment

    # ---- rows

    def _rows(self, frame: Frame, segments: tuple[Segment, ...]) -> mx.array:
        """Return the rows to run: embedded tokens on the first stage, otherwise the tensor without stale segments."""
        if self.first:
            return self.stage.embed([t for s in segments if not s.cancelled for t in s.tokens])
        hidden = self.stage.modules.config.hidden_size
        if frame.shape != (frame.rows, hidden):
            raise ProtocolError(f"hidden states {frame.shape}, expected {(frame.rows, hidden)}")
        x = from_bytes(frame.dtype, frame.shape, frame.tensor)
        running_rows: list[int] = []
        row = 0
        for before, now in zip(frame.segments, segments, strict=True):
            if not now.cancelled:
                running_rows.extend(range(row, row + now.rows))
            row += before.rows
        return x if len(running_rows) == x.shape[0] else x[mx.array(running_rows)]

    def _run(self, out: Frame, x: mx.array, runs: list[Run], stamps: FrameStamps) -> Frame:
        x = self.stage.forward(x, runs)
        # Sequences that run together may share arrays.
        shared = {id(array): array for sequence, _ in runs for array in sequence.arrays()}
        states = list(shared.values())
        if self.verifier is None:
            stamps.mark(StageStep.BUILT)
            plain = plain_view(x)
            mx.eval(plain, *states)
            stamps.mark(StageStep.COMPUTED)
            out = out.with_tensor(*to_bytes(x, plain))
            stamps.mark(StageStep.READ)
            return out
        outcomes = self.verifier.verify(x, runs, states, stamps)
        stamps.mark(StageStep.READ)
        for sequence, segment in runs:
            if segment.open:  # this stage applies the outcome at once, without a signal
                accepted_length = outcomes[segment.seq_id, segment.window].accepted_length
                _commit_early(sequence, segment.window, accepted_length)
        return replace(out, outcomes=self.verifier.outcomes(out.segments, outcomes))


def _commit_early(sequence: SequenceCache, window: int, accepted_length: int) -> None:
    """Apply a commit before its header arrives, and start to compute a restored state."""
    result = sequence.commit(window, accepted_length, in_header=False)
    if result.cut is not None:
        mx.async_eval(*sequence.arrays())
