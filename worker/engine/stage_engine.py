"""The engine of one stage, which turns frames into frames: operations, segments, rows, outcomes.

All its code runs on the one thread that uses MLX. The header is authoritative: two engines that process the same frames
hold the same sequences, for any signals between them.

The last of several stages relays tokens to the first, so that plain decoding runs ahead of the coordinator. Each frame
with a segment that asks for it makes one message, in the order of the frames. So a frame that continues never waits for
tokens behind those of a later frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import mlx.core as mx
import numpy as np

from mtp.device import this_device
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
from proto.frame_stamps import FrameStamps, StageStep
from proto.images import FIRST_IMAGE_TOKEN, without_images
from proto.wire import MAX_INT
from worker.cache.sequence_cache import Border, LastStageState, PrefixEntry, SequenceCache, copies_of
from worker.engine.prefix_disk import StagePrefixes
from worker.engine.stage_backups import ReceivedBackup, StageBackups, array_of, plain_array, type_name
from worker.model.stage import Run, Stage
from worker.model.verifier import Verdict, Verifier


def to_bytes(x: mx.array, plain: mx.array | None = None) -> tuple[str, tuple[int, ...], memoryview]:
    """Return the dtype's name, the shape and the buffer of `x`, whose `plain_array` is `plain` if it was evaluated.

    The buffer keeps the array alive. MLX copies `x` only to make it contiguous.
    """
    array: Any = plain_array(x) if plain is None else plain  # it has the buffer protocol
    data = memoryview(array)
    if not data.c_contiguous:
        data = np.ascontiguousarray(data).data
    return type_name(x), x.shape, data.cast("B")


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


class StageEngine:
    """The state of one stage in one epoch. Only the last stage has a `verifier`; the `first` stage embeds tokens."""

    def __init__(
        self,
        stage: Stage,
        *,
        epoch: int,
        first: bool,
        verifier: Verifier | None,
        budget: Budget = UNLIMITED,
    ) -> None:
        self.stage = stage
        self.group = stage.modules.communicator
        self.announce: Callable[[Frame], None] | None = None
        """Sends a frame to the other members of the group, on its first member."""
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
        self.failed = False  # a frame could not be finished
        self.frames_done = 0
        self.last_finished = 0.0
        """Seconds of `time.perf_counter`. When the newest finished frame was finished."""
        self.disk: StagePrefixes | None = None
        self._borders: dict[int, Border] = {}
        """The newest saved or restored prefix of each sequence."""
        self._drafts_asked = False  # by the newest frame
        self._saved: list[tuple[int, PrefixEntry]] = []
        """Sequences and prefix entries that the present header saves. Their copies are lazy."""

    # ---- frames and signals

    def process(self, frame: Frame) -> Frame:
        """Apply a frame's operations, run its segments, and return the frame for the next hop.

        Raises StaleEpochError for another epoch, and ProtocolError for a frame that is out of order or invalid here.
        """
        begun = self.begin_frame(frame, FrameStamps(0, StageStep))
        out = begun.finish_frame()
        begun.clean_up()
        return out

    def begin_frame(self, frame: Frame, stamps: FrameStamps) -> BegunFrame:
        """Apply a frame's operations and let the device compute its segments. Raises the errors of `process`.

        A frame that continues may begin while the frame before it is unfinished. Frames finish in order.
        """
        started = time.perf_counter()
        stamps.mark(StageStep.BEGUN)
        self._check(frame)
        for op in frame.ops:
            self._apply(op)
        late_copies = self._start_copies(frame)
        # The first member decides which segments run. Signals reach the members at different times, so the others
        # follow its frame: a collective that one of them skipped would wait without end.
        segments = frame.segments if self.group.rank else tuple(map(self._mark, frame.segments))
        if self.announce is not None:
            self.announce(self._decided(frame, segments))
        runs: list[Run] = [(self.sequences[s.seq_id], s) for s in segments if not s.cancelled]
        verdict: Verdict | None = None
        x = plain = None
        if runs:
            x = self.stage.forward(self._rows(frame, segments), runs)
            # Sequences that run together may share arrays.
            shared = {id(array): array for sequence, _ in runs for array in sequence.arrays()}
            states = list(shared.values())
            if self.verifier is not None:
                verdict = self.verifier.begin_verdict(x, runs, states, stamps)
            else:
                plain = plain_array(x)
                stamps.mark(StageStep.BUILT)
                mx.async_eval(plain, *states)
        self.frames_done += 1
        self._drafts_asked = any(segment.drafts for segment in segments)
        return BegunFrame(self, frame, segments, runs, verdict, x, plain, stamps, started, late_copies)

    def can_run_ahead(self, frame: Frame) -> bool:
        """Return whether `frame` may begin before the frame before it is finished.

        MLX copies a K/V cache that unfinished work reads, instead of updating it in place. NVIDIA GPUs have a kernel.
        """
        if self.stage.token_layers:
            return False
        if not (self.first and self.verifier is not None):
            # The token comes from another stage, and the next stage waits for the rows.
            return False
        if self.group.size > 1 and self._drafts_asked:
            # The end of that frame may have collectives, of drafts that the host draws. Members end it at different
            # moments, and all of them must have one order of collectives.
            return False
        held = (self.sequences.get(segment.seq_id) for segment in frame.segments)
        rows = sum(max(1, len(segment.tokens)) for segment in frame.segments)
        copied = sum(s.copied_nbytes(rows) for s in held if s is not None)
        return copied <= this_device().ahead_kv_bytes

    def rollback(self, epoch: int, seq_id: int, window: int, trim: int) -> None:
        """Drop the last `trim` tokens of an open window, by signal, before a header does. Raises ProtocolError."""
        sequence = self.sequences.get(seq_id)
        if epoch != self.epoch or sequence is None:
            return
        for one in sequence.stack.windows:
            if one.number == window:
                _commit_early(sequence, window, one.width - trim)
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

    # ---- header

    def _check(self, frame: Frame) -> None:
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

    def _apply(self, op: Op) -> None:
        match op:
            case Admit():
                self._check_room(op)
                self.sequences[op.seq_id] = self.stage.new_sequence(op)
                if self.verifier is not None:
                    self.verifier.admit(op)
            case Commit():
                self._sequence(op.seq_id).commit_window(op.window, op.accepted_length, in_header=True)
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
                self.backups.make_backup(op, self._sequence(op.seq_id), self._last_state(op))
            case RestoreBackup():
                last = self._last_state(op)
                border = self.backups.restore_backup(op, self._sequence(op.seq_id), last)
                if border is not None:
                    self._borders[op.seq_id] = border

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
        sequence = self._sequence(op.seq_id)
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

    def _start_copies(self, frame: Frame) -> list[PrefixEntry]:
        """Copy the saved prefixes of sequences that `frame` changes: lazy copies keep caches. Return the others."""
        if not self._saved:
            return []
        running = {segment.seq_id for segment in frame.segments}
        mx.async_eval([list(entry.arrays()) for seq_id, entry in self._saved if seq_id in running])
        late = [entry for seq_id, entry in self._saved if seq_id not in running]
        self._saved.clear()
        return late

    def _restore(self, op: RestorePrefix) -> None:
        sequence = self._sequence(op.seq_id)
        entry = self.prefixes.get(op.entry)
        if entry is None or sequence.stack.length:
            raise ProtocolError(f"prefix {op.entry} cannot be restored into sequence {op.seq_id}")
        self._borders[op.seq_id] = entry.border
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
        stale = segment.cancelled or self._sequence(segment.seq_id).stack.stale
        if not stale and segment.continues and self.relayed is not None:
            stale = self.relayed.token_of(segment) is None
        return replace(segment, cancelled=True) if stale else segment

    def _decided(self, frame: Frame, segments: tuple[Segment, ...]) -> Frame:
        """Return `frame` as the other members run it: with the tokens and the rows of the segments that run."""
        if self.relayed is not None:
            known = (
                replace(s, tokens=(self.relayed.token_of(s) or 0,), continues=False)
                if s.continues and not s.cancelled
                else s
                for s in segments
            )
            segments = tuple(known)
        pairs = [(b.rows, now.rows) for b, now in zip(frame.segments, segments, strict=True)]
        if not frame.tensor or all(before == now for before, now in pairs):
            return replace(frame, segments=segments)
        row_bytes, start, kept = len(frame.tensor) // frame.rows, 0, []
        for before, now in pairs:
            kept.append(frame.tensor[start : start + now * row_bytes])
            start += before * row_bytes
        rows = sum(now for _, now in pairs)
        if not rows:
            return replace(frame, segments=segments, dtype="", shape=(), tensor=b"")
        shape = (rows, *frame.shape[1:])
        return replace(frame, segments=segments, shape=shape, tensor=b"".join(kept))

    # ---- rows

    def _tokens(self, segments: Sequence[Segment]) -> mx.array:
        """Return the tokens of segments that run, on the first stage: `[rows]`."""
        image = self.stage.modules.config.image_token
        known: list[int | None] = []
        for segment in segments:
            if segment.continues and self.relayed is not None:
                known.append(self.relayed.token_of(segment))
            else:
                known += without_images(segment.tokens, image)
        ahead = [segment for segment in segments if segment.continues]
        if not ahead or self.verifier is None:
            return mx.array(known, mx.uint32)
        chosen = self.verifier.next_tokens(ahead)
        if not known:
            return chosen
        tokens = mx.concatenate([chosen, mx.array(known, mx.int32)])
        chosen_rows, known_rows = iter(range(len(ahead))), iter(range(len(ahead), tokens.size))
        rows = (islice(chosen_rows if s.continues else known_rows, s.width) for s in segments)
        return tokens[mx.array([*chain.from_iterable(rows)])]

    def _rows(self, frame: Frame, segments: tuple[Segment, ...]) -> mx.array:
        """Return the rows to run: embedded tokens on the first stage, otherwise the tensor without stale segments."""
        if not self.first:
            width = self.stage.modules.config.shape.hop_width
            return self._received_rows(frame, segments, width)
        running = [s for s in segments if not s.cancelled]
        words = self._tokens(running)
        if self.stage.token_layers:
            self.stage.announce_tokens(words, [(self.sequences[s.seq_id], s) for s in running])
        x = self.stage.embed(words)
        tokens = [token for segment in running if not segment.open for token in segment.tokens]
        if max(tokens, default=0) < FIRST_IMAGE_TOKEN:
            return x
        flags = [t >= FIRST_IMAGE_TOKEN for s in running for t in s.tokens or (0,) * s.width]
        images = self._received_rows(frame, segments, self.stage.modules.config.hidden_size)
        images = self.stage.in_streams(images)
        return mx.where(mx.array(flags)[:, None], images.astype(x.dtype), x)

    def _received_rows(self, frame: Frame, segments: tuple[Segment, ...], width: int) -> mx.array:
        """Return the rows of the frame's tensor that run. Raises ProtocolError for another shape."""
        if frame.shape != (frame.rows, width):
            raise ProtocolError(f"hidden states {frame.shape}, expected {(frame.rows, width)}")
        x = array_of(frame.dtype, frame.shape, frame.tensor)
        running_rows: list[int] = []
        row = 0
        for before, now in zip(frame.segments, segments, strict=True):
            running_rows += range(row, row + now.rows)
            row += before.rows
        return x if len(running_rows) == x.shape[0] else x[mx.array(running_rows)]


@dataclass
class BegunFrame:
    """A frame whose segments the device computes. Call `finish` and then `clean_up`.

    `segments` are those of `frame`, some of them cancelled here. `verdict` is that of the last stage. `x` are the
    hidden states for the next stage and `plain` their view for Python.
    """

    engine: StageEngine
    frame: Frame
    segments: tuple[Segment, ...]
    runs: Sequence[Run]
    verdict: Verdict | None
    x: mx.array | None
    plain: mx.array | None
    stamps: FrameStamps
    started: float
    late_copies: list[PrefixEntry]
    outcomes: tuple[Outcome, ...] = ()

    def finish_frame(self) -> Frame:
        """Wait for the device and return the frame for the next hop."""
        frame, stamps, verifier = self.frame, self.stamps, self.engine.verifier
        dtype, shape = "", tuple[int, ...]()
        tensor: memoryview | bytes = b""
        if self.x is not None and verifier is None:
            mx.eval(self.plain)
            stamps.mark(StageStep.COMPUTED)
            dtype, shape, tensor = to_bytes(self.x, self.plain)
            stamps.mark(StageStep.READ)
        elif verifier is not None:
            found = {} if self.verdict is None else self.verdict.finish(stamps)
            self.outcomes = verifier.outcomes(self.segments, found)
            stamps.mark(StageStep.READ)
        now = time.perf_counter()
        elapsed = now - max(self.started, self.engine.last_finished)
        self.engine.last_finished = now
        stage_us = (*frame.stage_us, int(elapsed * 1e6))
        outcomes = self.outcomes or frame.outcomes
        head = (frame.epoch, frame.number, frame.ops, self.segments, outcomes, stage_us)
        return Frame(*head, dtype, shape, tensor)

    def clean_up(self) -> None:
        """Do what the next hop does not wait for: copy prefixes, apply outcomes early, and release memory."""
        if self.late_copies:
            mx.async_eval([list(entry.arrays()) for entry in self.late_copies])
        if self.verdict is not None:
            accepted = {(o.seq_id, o.window): o.accepted_length for o in self.outcomes}
            for sequence, segment in self.runs:
                # Only the coordinator knows whether the text ended before a window that continues.
                if segment.open and not segment.continues:
                    count = accepted[segment.seq_id, segment.window]
                    _commit_early(sequence, segment.window, count)
            self.verdict.clean_up()
        self.x = self.plain = self.verdict = None


def _commit_early(sequence: SequenceCache, window: int, accepted_length: int) -> None:
    """Apply a commit before its header arrives, and start to compute a restored state."""
    result = sequence.commit_window(window, accepted_length, in_header=False)
    if result.cut is not None:
        mx.async_eval(*sequence.arrays())
