"""The scheduler: it decides which tokens of which sequences the next frame carries. Plain data, no tensors, no clock.

The scheduler keeps a pipeline of N stages full:
* Decoding sequences travel in micro-batches. A micro-batch takes ⌈c/N⌉ of the c decoding sequences, those that waited
  longest. At most N micro-batches are in flight. Sequences that become ready meanwhile wait and travel together.
* With c < N, up to ⌊N/c⌋ windows of a sequence are in flight. All but the first are speculative: each builds on the
  unverified windows before it.
* Stages run ahead of plain decoding: while a frame is in flight, the next one continues its windows with tokens that
  only the last stage knows yet. So no stage waits for the coordinator.
* Prompts use pipelined chunked prefill: up to N + 1 chunks are in flight, because a chunk needs no outcome of the
  chunk before it. A ready micro-batch goes before the next chunk, so a running stream waits for at most one chunk a
  stage. N micro-batches leave room for a chunk, so a prompt never waits for a stream to end.

The caller passes times in seconds. The scheduler only subtracts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Row
from dataclasses import dataclass, field, replace

from coordinator.drafts.averages import DraftResult, Shape
from coordinator.drafts.controller import MAX_DEPTH, Controller
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits, Prompts, check_queue, check_request
from coordinator.schedule.backups import BackupInFlight, Backups
from coordinator.schedule.in_flight import FrameInFlight, LastWindow, StepTimer
from coordinator.schedule.prefix_cache import BLOCK, PrefixCache
from coordinator.schedule.request import Finished, GenerationEvent, GenerationRequest, PrefillProgress, TokenChunk
from coordinator.schedule.sequence import Sequence
from mtp.device import FrameLimits
from proto.backup import prefix_key
from proto.control import Rollback
from proto.errors import ProtocolError, StaleEpochError
from proto.frame import DropPrefix, Evict, Frame, Op, Outcome, RestoreBackup, RestorePrefix, SavePrefix, Segment
from proto.wire import DTYPE_BYTES


@dataclass
class FrameOutcome:
    """Events for clients, by `seq_id`; rollbacks for workers; results of drafts in the order of their chains.

    `draft_results` are those of the head's drafts, `matched_results` those of matches of the text. `now` is the time of
    the frame's return. `backup` is the backup that it has made, for the coordinator to read.
    """

    now: float
    events: list[tuple[int, GenerationEvent]] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)
    draft_results: list[DraftResult] = field(default_factory=list)
    matched_results: list[DraftResult] = field(default_factory=list)
    backup: BackupInFlight | None = None

    def add_tokens(self, seq_id: int, chunk: TokenChunk) -> None:
        """Add an event for the tokens of `chunk`, unless it has none."""
        if chunk.tokens:
            self.events.append((seq_id, chunk))

    @property
    def token_count(self) -> int:
        """Number of tokens emitted by the frame."""
        chunks = (event for _, event in self.events if isinstance(event, TokenChunk))
        return sum(len(chunk.tokens) for chunk in chunks)


KV_STEP = 256
"""Tokens. K/V caches grow in steps of this size, so a copy of a cache is as long as the next multiple."""


def open_windows(capacity: Capacity, decoding: int) -> int:
    """Return how many open windows of each of `decoding` sequences fit into the plan's memory.

    The plan reserves one open window for each sequence that it admits.
    """
    return 2 * capacity.sequences // decoding - 1


def windows_per_sequence(capacity: Capacity, stages: int, decoding: int) -> int:
    """Return how many windows each of `decoding` sequences may have in flight so that no stage is idle."""
    if stages < 2 * decoding:
        return 1
    return max(1, min(stages // decoding, open_windows(capacity, decoding), MAX_DEPTH + 1))


def may_run_ahead(capacity: Capacity, stages: int, running: Collection[Sequence]) -> bool:
    """Return whether the plan's memory allows a second open window of each of the `running` sequences.

    The header of a window commits the window two places before it. So a stage that computes the second open window
    holds three states of a sequence, which the plan reserves (`STATES_PER_SEQUENCE`): before either window, and the one
    that it computes. A single stage begins the second window before the first is finished, and MLX then copies the K/V.
    This takes K/V that no sequence has reserved, unless the plan has memory for more open windows.
    """
    if stages > 1 or open_windows(capacity, len(running)) > 1:
        return True
    copied = sum(len(sequence.tokens) + KV_STEP for sequence in running)
    return copied <= capacity.kv_tokens - sum(sequence.capacity for sequence in running)


def sequences_to_run_ahead(decoding: Row[Sequence], stages: int) -> list[Sequence]:
    """Return the sequences of the next frame that continues one in flight, or none.

    A sequence whose limit is reached by the windows in flight does not count. On a single stage all sequences run ahead
    or none does, so that they stay in one micro-batch. Over several stages only the micro-batch that was sent first may
    be continued. So frames never wait behind a frame whose tokens come later than theirs.
    """
    group = decoding if stages == 1 else _first_micro_batch(decoding, stages)
    going = [s for s in group if s.tokens_in_flight < s.remaining]
    return going if all(s.can_run_ahead(relayed=stages > 1) for s in going) else []


def _first_micro_batch(decoding: Row[Sequence], stages: int) -> list[Sequence]:
    """Return the sequences of the micro-batch whose newest frame is the oldest.

    There is none while a sequence waits for a place, and where returning frames would make micro-batches more equal.
    """
    count = min(len(decoding), stages)
    frames = [s.newest_frame.number for s in decoding if s.windows_in_flight]
    if len(frames) < len(decoding) or len(set(frames)) != count:
        return []
    first = [s for s, frame in zip(decoding, frames, strict=True) if frame == min(frames)]
    return first if len(first) <= -(-len(decoding) // count) else []


class Scheduler:
    """The queue, the micro-batches and the prefill of one plan.

    The caller sends each frame of `next_frame` to the pipeline, and passes each returned frame to `apply_outcomes`.
    `vocabulary` is the tokenizer's packed vocabulary, for sequences with a grammar.
    """

    def __init__(self, limits: Limits, controller: Controller, vocabulary: bytes = b"") -> None:
        self.limits = limits
        self.controller = controller
        self.stages = 1
        self.epoch = 0
        self.capacity = Capacity(sequences=0, kv_tokens=limits.context, prefix_bytes=0)
        """Capacity of the plan. Before the first plan it admits no sequence."""
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """Admitted sequences, in the order in which they may send."""
        self.ops: list[Op] = []
        """The operations of the next header, in the order of the decisions."""
        self.prefixes = PrefixCache()
        self.backups = Backups()
        self.in_flight: deque[FrameInFlight] = deque()
        self.prompts = Prompts()
        self.next_number = 0
        self._next_seq = 0
        self._step_timer = StepTimer(self.stages)
        self._vocabulary = vocabulary
        self._vocabulary_sent = False  # in this epoch
        self._shape: Shape | None = None
        """The shape that the controller chose for the next micro-batch, until it is sent."""

    def reset(
        self,
        stages: int,
        epoch: int,
        capacity: Capacity,
        now: float,
        frame_limits: FrameLimits | None = None,
    ) -> FrameOutcome:
        """Start a new plan: forget the frames in flight, and queue every running sequence again.

        Running sequences go to the head of the queue, the oldest first, and are prefilled from their tokens. A sequence
        that exceeds the capacity of the new plan ends with an error. `frame_limits` are those of the plan's machines.
        """
        if frame_limits is not None:
            self.limits = replace(self.limits, frames=frame_limits)
        self.stages, self.epoch, self.capacity = stages, epoch, capacity
        self.next_number = 0
        self.in_flight.clear()
        self.ops.clear()
        self.prefixes.reset(capacity)
        self.backups.in_flight = None
        self._vocabulary_sent = False
        self.controller.forget_costs()
        self._shape = None
        self._step_timer, self.prompts = StepTimer(stages), Prompts()
        running = sorted(self.running.values(), key=lambda sequence: sequence.seq_id)
        self.running.clear()
        for place, sequence in enumerate(running):
            sequence.reset_for_plan()
            sequence.interrupted = place < capacity.sequences
        self.waiting.extendleft(reversed(running))
        for sequence in self.waiting:
            if not sequence.may_restore:
                self.backups.drop_backup(sequence.seq_id)
            sequence.expected_prefix, sequence.sought = 0, False
            sequence.await_backup(0)
        outcome = FrameOutcome(now)
        for sequence in [s for s in self.waiting if s.capacity > capacity.kv_tokens]:
            self.waiting.remove(sequence)
            self.backups.drop_backup(sequence.seq_id)
            message = "the remaining machines have too little memory to continue this request"
            ended = Finished("error", sequence.stats(now), error=message)
            outcome.events.append((sequence.seq_id, ended))
        return outcome

    # ---- requests

    def submit(self, request: GenerationRequest, now: float) -> Sequence:
        """Queue a request. Raises RequestError if it can never be served, and CapacityError if the queue is full."""
        check_request(request, self.limits.context, self.limits.vocab, self.capacity.kv_tokens)
        served = self.capacity.sequences
        places = self.capacity.queue + max(0, served - len(self.running))
        check_queue(self.waiting, places, request.client, served)
        own_shape = self.controller.own_shape(request.drafts)
        matcher = None if own_shape else self.controller.new_matcher()
        sequence = Sequence(self._next_seq, request, now, own_shape=own_shape, matcher=matcher)
        self._next_seq += 1
        self._queue_sequence(sequence)
        return sequence

    def cancel_sequence(self, seq_id: int) -> None:
        """Remove a sequence without a client. Evict in the next header removes it from the stages.

        The computed part of a prompt becomes a prefix entry, so the client can send the prompt again and continue.
        """
        for waiting in self.waiting:
            if waiting.seq_id == seq_id:
                self.waiting.remove(waiting)
                self.backups.drop_backup(seq_id)
                if waiting.restorable_tokens:
                    self.ops.append(Evict(seq_id))
                return
        sequence = self.running.get(seq_id)
        if sequence is not None:
            if self._may_keep(sequence):
                self._save_prefix(sequence, sequence.scheduled_tokens, partial=True)
            self._remove_sequence(sequence)

    def _may_keep(self, sequence: Sequence) -> bool:
        """Return whether the part of a prompt that was sent is worth a prefix entry."""
        sent = sequence.scheduled_tokens
        whole = sent >= sequence.prefill_tokens
        return not whole and sent - sequence.saved_prefix >= BLOCK and self.prefixes.fits(sent)

    def can_skip(self, seq_id: int) -> bool:
        """Return whether stages may skip the segments in flight of a sequence without a client.

        They may not while a prefix entry is being saved from it, or will be. A stage that gets the signal early would
        compute fewer of the chunks than the others, and the entry would differ from stage to stage.
        """
        sequence = self.running.get(seq_id)
        if sequence is None or self._may_keep(sequence):
            return False
        return sequence.saved_prefix <= sequence.computed_tokens

    # ---- frames out

    def next_frame(self, now: float) -> Frame | None:
        """Return the next frame to send, or None if there is no work or the pipeline is full."""
        record = FrameInFlight(self.next_number, now, alone=not self.in_flight)
        self.backups.choose_due(self.running.values(), now)
        if (last := self.backups.next_to_hand_over(self.running.values())) is not None:
            sequence, held = last
            self._queue_commit(sequence)
            self.ops.append(self.backups.begin_backup(sequence.seq_id, held, self.next_number))
        segments = [] if self.backups.holding else self._next_segments(record, now)
        if not segments and not self.ops:
            return None
        frame = Frame(self.epoch, self.next_number, tuple(self.ops), tuple(segments))
        frame = self._with_image_rows(frame)
        self.ops.clear()
        self.next_number += 1
        self.in_flight.append(record)
        return frame

    def _next_segments(self, record: FrameInFlight, now: float) -> list[Segment]:
        """Return the windows or the prompt chunks of the next frame, of the sequences that have a place."""
        self._pause_for_others(now)
        while sequence := self.prompts.next_to_admit(
            self.running, self.waiting, self.capacity, self.limits, self.stages
        ):
            self._place_sequence(sequence, now)
        return self._next_micro_batch(record) or self._next_chunks()

    def _pause_for_others(self, now: float) -> None:
        """Give a place of the client with the most sequences to one that waits.

        The sequence waits until nothing of it is in flight. It returns from its tokens, without computing them again if
        its state is still in the prefix cache.
        """
        chosen, wanted = self.prompts.next_to_pause(self.running, self.waiting, self.capacity, now) or (None, None)
        for sequence in self.running.values():
            sequence.pausing = sequence is chosen
        if chosen is None or wanted is None or chosen.is_in_flight:
            return
        self._queue_commit(chosen)
        self._save_prefix(chosen, chosen.held_tokens, partial=True)
        self.ops.append(Evict(chosen.seq_id))
        del self.running[chosen.seq_id]
        chosen.pause()
        self._queue_sequence(chosen)
        placed = [*self.running.values(), *(one for one in self.waiting if one.is_placed), wanted]
        if sum(one.capacity for one in placed) <= self.capacity.kv_tokens:
            self._place_sequence(wanted, now)

    def _queue_sequence(self, sequence: Sequence) -> None:
        entry = self.prefixes.find_entry(sequence.tokens, sequence.hash_blocks())
        sequence.expected_prefix = 0 if entry is None else entry.tokens
        self.waiting.append(sequence)

    def _place_sequence(self, sequence: Sequence, now: float) -> None:
        self.waiting.remove(sequence)
        sequence.scheduled_at = sequence.scheduled_at or now
        self.prompts.record_place(sequence, self.running, self.waiting, now)
        self.running[sequence.seq_id] = sequence

    def _next_micro_batch(self, record: FrameInFlight) -> list[Segment]:
        """Return windows of the sequences that waited longest, or none if the pipeline has no room."""
        decoding = [s for s in self.running.values() if s.decoding]
        oldest = self.in_flight[0].number if self.in_flight else self.next_number
        # A frame that continues one in flight is no micro-batch of its own.
        own = (one for one in self.in_flight if one.follows is None or one.follows < oldest)
        in_flight = sum(1 for one in own if one.valid_windows)
        if not decoding or in_flight > self.stages:
            return []
        all_decode = len(decoding) == len(self.running)
        filled = all_decode and windows_per_sequence(self.capacity, self.stages, len(decoding)) > 1
        chosen, shape = list[Sequence](), Shape()
        if filled and in_flight < self.stages:
            chosen, shape = self._next_speculative(decoding)
        elif in_flight < self.stages:
            ready = [s for s in decoding if not s.windows_in_flight]
            chosen = ready[: -(-len(decoding) // self.stages)]
        if not chosen and all_decode:
            chosen = self._next_to_run_ahead(decoding, filled=filled)
            record.follows = next((s.newest_frame.number for s in chosen if s.windows_in_flight), None)
        shapes = [shape] * len(chosen) if filled else self._next_shapes(chosen)
        relay = all_decode and self.stages > 1
        segments = [
            self._window_segment(sequence, own, record, relay=relay)
            for sequence, own in zip(chosen, shapes, strict=True)
        ]
        if chosen:
            self._shape = None
            record.decode_rows = record.valid_windows = len(chosen)
            record.micro_batches = min(len(decoding), self.stages)
            record.fill = self._fill(len(decoding))
            record.speculative = len(chosen[0].windows_in_flight) > 1 and not record.continues
            record.shape = shapes[0]
        return segments

    def _next_shapes(self, chosen: Row[Sequence]) -> list[Shape]:
        """Return the shape of each window of the next micro-batch. The head's is chosen only if one of them has it."""
        matched = self._matched_shapes(chosen)
        own = [sequence.own_shape or shape for sequence, shape in zip(chosen, matched, strict=True)]
        if all(own):
            return [shape for shape in own if shape is not None]
        usual = self._next_shape(len(chosen))
        return [shape or usual for shape in own]

    def _matched_shapes(self, chosen: Row[Sequence], fill: int = 1) -> list[Shape | None]:
        """Return the shapes of windows with drafts from the texts of `chosen`, None where they do not pay.

        The sequences step together, each with up to `fill` windows in flight.
        """
        matchers = [sequence.matcher if sequence.has_match else None for sequence in chosen]
        return self.controller.matched_shapes(matchers, fill)

    def _next_shape(self, count: int) -> Shape:
        """Return the shape of the next micro-batch, of `count` sequences. It is chosen once."""
        if self._shape is None:
            self._shape = self.controller.choose_shape(count)
        return self._shape

    def _next_to_run_ahead(self, decoding: list[Sequence], *, filled: bool) -> list[Sequence]:
        """Return the sequences of the next frame that continues one in flight, or none.

        There is none where drafts pay. A backup needs a moment without open windows. With `filled` each sequence has a
        shape of its own.
        """
        running = self.running.values()
        if self.backups.due is not None or not may_run_ahead(self.capacity, self.stages, running):
            return []
        going = sequences_to_run_ahead(decoding, self.stages)
        if not going:
            return []
        shapes = [going[0].shape] if filled else self._next_shapes(going)
        if any(shape is None or shape.ahead for shape in shapes):
            return []
        fill = self._fill(len(decoding)) if filled else 1
        return [] if any(self._matched_shapes(going, fill)) else going

    def _fill(self, decoding: int) -> int:
        """Return how many windows a sequence may have in flight. It is one while prompts keep the stages busy."""
        if decoding < len(self.running):
            return 1
        return windows_per_sequence(self.capacity, self.stages, decoding)

    def _next_speculative(self, decoding: list[Sequence]) -> tuple[list[Sequence], Shape]:
        """Return the first sequence that may send a window, as a list of at most one, and the window's shape."""
        for sequence in decoding:
            if sequence.shape is None:
                fill = self._fill(len(decoding))
                (matched,) = self._matched_shapes([sequence], fill)
                sequence.shape = sequence.own_shape or matched or self.controller.choose_shape(1, fill)
            if sequence.shape.matched:
                sequence.draft_from_match(sequence.shape)
            if sequence.windows_in_flight and sequence.seq_id == self.backups.due:
                continue  # a backup needs a moment without open windows
            if sequence.can_send_window(sequence.shape):
                return [sequence], sequence.shape
        return [], Shape()

    def _window_segment(self, sequence: Sequence, shape: Shape, record: FrameInFlight, *, relay: bool) -> Segment:
        """Return the next window of `sequence`. It never exceeds the request's limit."""
        self._queue_commit(sequence)
        position = len(sequence.tokens) - 1 + sequence.tokens_in_flight
        if not sequence.windows_in_flight:
            self._queue_backup(sequence, position)
        if shape.matched:
            sequence.draft_from_match(shape)
        window = sequence.next_window(shape, record, relay=relay)
        # The sequence moves to the end, so the next micro-batch takes other sequences first.
        self.running[sequence.seq_id] = self.running.pop(sequence.seq_id)
        return Segment(
            sequence.seq_id,
            window.number,
            position=position,
            tokens=window.tokens,
            open=True,
            sample=True,
            drafts=min(shape.depth, max(0, sequence.remaining - window.first - 2)),
            continues=window.continues,
            relay=window.relays,
            source=sequence.source_of(window),
        )

    def _next_chunks(self) -> list[Segment]:
        if len(self.in_flight) > self.stages:
            return []
        running, waiting, stormy = self.running, self.waiting, self.backups.stormy
        chunks = self.prompts.next_chunks(running, waiting, self.limits, self.stages, stormy=stormy)
        return [self._chunk_segment(sequence, length) for sequence, length in chunks]

    def _chunk_segment(self, sequence: Sequence, max_length: int) -> Segment:
        if not sequence.admitted:
            self._admit_sequence(sequence)
        start = sequence.scheduled_tokens
        self._queue_backup(sequence, start)
        boundaries = sequence.prefix_boundaries
        if boundaries and start == boundaries[0]:
            self._save_prefix(sequence, boundaries.pop(0))
        elif self.prefixes.is_partial_due(start, sequence.saved_prefix, sequence.prefill_tokens):
            self._save_prefix(sequence, start, partial=True, evict=False)
        end = boundaries[0] if boundaries else sequence.prefill_tokens
        sequence.scheduled_tokens = sequence.chunk_end(start, min(end, start + max_length))
        last = not sequence.prefilling
        depth = sequence.own_shape.depth if sequence.own_shape else self._first_depth()
        drafts = min(depth, max(0, sequence.remaining - 2)) if last else 0
        return Segment(
            sequence.seq_id,
            sequence.next_window_number(),
            position=start,
            tokens=tuple(sequence.tokens[start : sequence.scheduled_tokens]),
            sample=last,
            drafts=drafts,
        )

    def _with_image_rows(self, frame: Frame) -> Frame:
        """Return `frame` with the rows of its images, if it has some. The rows of text are zeros."""
        images = [None if s.open else self.running[s.seq_id].request.image_at(s.position) for s in frame.segments]
        found = next((image for image in images if image is not None), None)
        if found is None:
            return frame
        size = len(found.row_bytes(found.span.start, found.span.start + 1))
        parts = [
            bytes(size * segment.rows)
            if image is None
            else image.row_bytes(segment.position, segment.position + segment.width)
            for segment, image in zip(frame.segments, images, strict=True)
        ]
        shape = (frame.rows, size // DTYPE_BYTES[found.dtype])
        return frame.with_tensor(found.dtype, shape, b"".join(parts))

    def _first_depth(self) -> int:
        """Return the number of drafts to request with the first token, so that speculative windows start at once."""
        decoding = 1 + sum(1 for s in self.running.values() if s.decoding)
        fill = self._fill(decoding)
        return self.controller.shape_in_use(1 if fill > 1 else -(-decoding // self.stages), fill).depth

    # ---- operations of the next header

    def _admit_sequence(self, sequence: Sequence) -> None:
        """Create a sequence on the stages, from its backup or from the longest prefix entry that they hold."""
        vocabulary = b""
        if sequence.request.params.grammar and not self._vocabulary_sent:
            vocabulary, self._vocabulary_sent = self._vocabulary, True
        self.ops.append(sequence.admit_op(vocabulary))
        sequence.admitted = True
        tokens, keys = sequence.tokens, sequence.hash_blocks()
        if sequence.restorable_tokens:
            self.ops.append(RestoreBackup(sequence.seq_id, sequence.restorable_tokens))
            sequence.start_after(sequence.restorable_tokens)
            if sequence.from_disk:
                self._save_prefix(sequence, sequence.scheduled_tokens)
        elif (entry := self.prefixes.find_entry(tokens, keys)) is not None:
            self.ops.append(RestorePrefix(sequence.seq_id, entry.number))
            sequence.start_after(entry.tokens)
            sequence.saved_prefix = entry.tokens
            sequence.partial_entry = entry.number if entry.partial else None
        start, turn = sequence.scheduled_tokens, sequence.request.turn
        sequence.prefix_boundaries = self.prefixes.boundaries(tokens, start, turn, keys)

    def _save_prefix(self, sequence: Sequence, length: int, *, partial: bool = False, evict: bool = True) -> None:
        """Save the stages' state of `sequence`, which is the state after `length` tokens, as a prefix entry."""
        tokens, former = sequence.tokens[:length], sequence.partial_entry
        entry, dropped = self.prefixes.add_entry(
            tokens, sequence.hash_blocks(), partial=partial, replaced=former, evict=evict
        )
        self.ops.extend(DropPrefix(number) for number in dropped)
        if entry is not None:
            self.ops.append(SavePrefix(sequence.seq_id, entry.number, prefix_key(tokens)))
            sequence.saved_prefix = length
            sequence.partial_entry = entry.number if partial else None

    def _queue_backup(self, sequence: Sequence, held: int) -> None:
        """Let the next frame back up `sequence`, of which the stages then hold `held` tokens, if that is due."""
        if sequence.seq_id == self.backups.due:
            backup = self.backups.begin_backup(sequence.seq_id, held, self.next_number)
            self.ops.append(backup)

    def _queue_commit(self, sequence: Sequence) -> None:
        """Queue the commit of the last window of `sequence`, if it has one."""
        if sequence.commit is not None:
            self.ops.append(sequence.commit)
            sequence.commit = None

    # ---- frames back

    def apply_outcomes(self, frame: Frame, now: float) -> FrameOutcome:
        """Apply the outcomes of a returned frame, the oldest in flight. Return the consequences.

        Raises StaleEpochError for a frame of another plan, ProtocolError if it is not the oldest in flight.
        """
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"a result of epoch {frame.epoch}, this plan is {self.epoch}")
        expected = self.in_flight[0].number if self.in_flight else self.next_number
        if frame.number != expected or len(frame.outcomes) != len(frame.segments):
            raise ProtocolError(f"frame {frame.number} returned where {expected} was expected")
        record = self.in_flight.popleft()
        self.prompts.record_frame(frame)
        self._record_step_cost(frame, record, now)
        result = FrameOutcome(now, backup=self.backups.returned(frame.number))
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True):
            sequence = self.running.get(segment.seq_id)
            if sequence is None or outcome.cancelled:
                continue
            if segment.open:
                self._apply_window(sequence, segment, outcome, result)
            else:
                self._apply_chunk(sequence, segment, outcome, result)
        return result

    def _record_step_cost(self, frame: Frame, record: FrameInFlight, now: float) -> None:
        sequence = self.running.get(frame.segments[0].seq_id) if frame.segments else None
        if sequence is None:
            return
        last, idle = sequence.last_window, not self.in_flight
        cost = self._step_timer.measure_step(frame, record, now, last, idle=idle)
        if cost is not None:
            rows = sum(segment.width for segment in frame.segments)
            drafts = max(segment.drafts for segment in frame.segments)
            self.controller.record_step_cost(record.decode_rows, record.fill, rows, drafts, record.shape, cost)

    def _apply_chunk(self, sequence: Sequence, segment: Segment, outcome: Outcome, result: FrameOutcome) -> None:
        sequence.computed_tokens = segment.position + segment.width
        sequence.open_restores = 0
        done, total = sequence.computed_tokens, sequence.prefill_tokens
        progress = PrefillProgress(done, total, sequence.cached_tokens)
        result.events.append((sequence.seq_id, progress))
        if outcome.token is not None:
            sequence.first_token_at = sequence.first_token_at or result.now
            sequence.last_window = replace(sequence.last_window, returned_at=result.now)
            tokens = sequence.apply_first_token(outcome)
            chunk = TokenChunk(tokens, outcome.logprobs[: len(tokens)])
            result.add_tokens(sequence.seq_id, chunk)
        self._follow_text(sequence)
        self._finish(sequence, segment, outcome, result)

    def _apply_window(self, sequence: Sequence, segment: Segment, outcome: Outcome, result: FrameOutcome) -> None:
        in_flight = sequence.windows_in_flight
        if not in_flight or in_flight[0].number != segment.window:
            return  # an earlier outcome invalidated the window
        sequence.windows_returned += 1
        sequence.last_window = LastWindow(result.now, in_flight[0].frame.number)
        window_outcome = sequence.apply_outcome(outcome)
        if window_outcome.matched:
            result.matched_results += window_outcome.draft_results
        else:
            result.draft_results += window_outcome.draft_results
            self.controller.record_drafts(window_outcome.draft_results)
        self._follow_text(sequence)
        for window in window_outcome.invalidated:
            window.frame.valid_windows -= 1
        if window_outcome.rollback is not None:
            result.rollbacks.append(window_outcome.rollback)
        tokens = window_outcome.tokens
        drafted = len(window_outcome.draft_results)
        logprobs = outcome.logprobs[: len(tokens)]
        chunk = TokenChunk(tokens, logprobs, drafted, window_outcome.accepted)
        result.add_tokens(sequence.seq_id, chunk)
        self._finish(sequence, segment, outcome, result)

    def _follow_text(self, sequence: Sequence) -> None:
        """Find the match of the newest tokens, and learn from the one before."""
        if sequence.matcher is None:
            return
        found = sequence.matcher.follow(sequence.tokens)
        if found is not None:
            self.controller.record_match(found)

    def _finish(self, sequence: Sequence, segment: Segment, outcome: Outcome, result: FrameOutcome) -> None:
        """If the text has ended, add the last event, save a useful prefix entry, and remove the sequence."""
        if sequence.finished is None:
            return
        accepted = 1 if segment.continues else min(len(segment.tokens), outcome.accepted_length)
        finished = Finished(sequence.finished, sequence.stats(result.now))
        result.events.append((sequence.seq_id, finished))
        self._queue_commit(sequence)
        if sequence.request.continued:
            self._save_prefix(sequence, segment.position + accepted)
        self._remove_sequence(sequence)

    def _remove_sequence(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        self.backups.drop_backup(sequence.seq_id)
        if sequence.admitted or sequence.restorable_tokens:
            self.ops.append(Evict(sequence.seq_id))

    def check(self) -> None:
        """Assert the invariants. Tests call it after each step, the loop when it is idle at debug level."""
        assert len(self.running) <= self.capacity.sequences
        assert sum(s.capacity for s in self.running.values()) <= self.capacity.kv_tokens
        numbers = range(self.next_number - len(self.in_flight), self.next_number)
        assert [record.number for record in self.in_flight] == list(numbers)
        for record in self.in_flight:
            assert 0 <= record.valid_windows <= record.decode_rows, record
        for sequence in self.running.values():
            sequence.check(self.stages)
            assert all(w.frame in self.in_flight for w in sequence.windows_in_flight), sequence
