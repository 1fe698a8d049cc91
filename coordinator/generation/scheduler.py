"""What the pipeline does next: which sequences, which tokens, in which order. Plain data, no tensors, no clock.

The pipeline of N stages is kept full:
* Sequences that decode travel in lanes: rows sent together. A lane takes ⌈c/N⌉ of the c sequences that decode,
  those that waited longest. No more than N lanes are under way: what gets ready beyond them waits, and so comes
  together in full lanes whenever it arrived.
* With c < N, up to ⌊N/c⌋ windows of a sequence are in flight, each built on the hope that those before it stand.
* Prompts travel as a convoy of up to N + 1 chunks, which need no outcome to follow each other. A lane that is ready
  goes before the next chunk, so running streams wait for one chunk a stage and no more; N lanes leave
  room for a chunk, so a prompt never waits for a stream to end.

Times are given by the caller, in seconds, and only ever subtracted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.generation.admission import check_request
from coordinator.generation.in_flight import InFlight, Rejection, Settlement
from coordinator.generation.prefix_cache import PrefixCache
from coordinator.generation.request import (
    Finished,
    GenerationRequest,
    PrefillProgress,
    TokenChunk,
)
from coordinator.generation.sequence import Sequence
from coordinator.planning.capacity import Capacity
from mtp.depth.controller import MAX_DEPTH, Controller
from mtp.depth.estimates import StepCost
from mtp.depth.shape import Shape
from proto.errors import CapacityError, ProtocolError, StaleEpochError
from proto.frame import (
    DropPrefix,
    Evict,
    Frame,
    Op,
    Outcome,
    RestorePrefix,
    SavePrefix,
    Segment,
)

CONVOY = 8
"""Chunks that a prompt is cut into where they do not get too small: N stages are then 8 N / (N + 7) times as fast."""

SMALLEST_CHUNK = 128
"""Fewer rows do not pay for reading a stage's weights, those of a mixture of experts above all."""


@dataclass(frozen=True)
class Limits:
    """What the user allows. `context` and `vocab` are the model's.

    `queue` requests may wait, None for as many as suit the plan. A prompt is cut into chunks of at most
    `prefill_chunk` tokens; chunks of several prompts share a frame up to `step_tokens`.
    """

    context: int
    vocab: int = 2**31
    queue: int | None = None
    prefill_chunk: int = 512
    step_tokens: int = 2048

    def chunk(self, prompt: int) -> int:
        """Most tokens of a chunk of a prompt of so many. A short prompt is cut smaller, into CONVOY chunks: two of 512
        leave half of the stages idle. Not by the number of stages: where a kernel rounds differently for other row
        counts, that number would show in the answer.
        """
        return min(self.prefill_chunk, max(SMALLEST_CHUNK, -(-prompt // CONVOY)))


class Scheduler:
    """Queue, lanes and convoy of one plan. The caller sends what `next_frame` gives and returns what comes back."""

    def __init__(self, limits: Limits, controller: Controller) -> None:
        self.limits = limits
        self.controller = controller
        self.stages = 1
        self.epoch = 0
        self.capacity = Capacity(sequences=0, kv_tokens=limits.context, prefix_bytes=0)
        """Nothing is admitted before the first plan."""
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.prefixes = PrefixCache()
        self.ops: list[Op] = []
        """What the next frame's header will do, in the order it was decided."""
        self.in_flight: deque[InFlight] = deque()
        self.next_number = 0
        self._next_seq = 0
        self._wires = 0.0
        """Seconds that a pass spends outside the stages."""

    def reset(self, stages: int, epoch: int, capacity: Capacity, now: float) -> Settlement:
        """A new plan serves: what was in flight is void, and every live sequence is fed again from its tokens.

        They go to the head of the queue, in their order. One that the new plan can never hold ends with an error.
        """
        self.stages, self.epoch, self.capacity = stages, epoch, capacity
        self.next_number = 0
        self.in_flight.clear()
        self.ops.clear()
        self.prefixes.reset(capacity)
        self.controller.forget_costs()
        self._wires = 0.0
        live = list(self.running.values())
        self.running.clear()
        for sequence in live:
            sequence.rebuild()
        self.waiting.extendleft(reversed(live))
        settlement = Settlement()
        for sequence in [s for s in self.waiting if s.capacity > capacity.kv_tokens]:
            self.waiting.remove(sequence)
            message = "the machines that are left have too little memory to go on with this request"
            ended = Finished("error", sequence.stats(now), error=message)
            settlement.events.append((sequence.seq_id, ended))
        return settlement

    # ---- requests

    @property
    def queue_limit(self) -> int:
        """Requests that may wait: as many as the user says, or as the present plan is good for."""
        return self.capacity.queue if self.limits.queue is None else self.limits.queue

    def submit(self, request: GenerationRequest, now: float) -> Sequence:
        """Queue a request. Raises RequestError when it can never be served, CapacityError when the queue is full."""
        check_request(request, self.limits.context, self.limits.vocab, self.capacity.kv_tokens)
        if len(self.waiting) >= self.queue_limit:
            raise CapacityError(
                f"{len(self.waiting)} requests are waiting already, the queue takes no more",
                retry_after=1.0 + len(self.waiting) / max(1, self.capacity.sequences),
            )
        sequence = Sequence(self._next_seq, request, now)
        self._next_seq += 1
        self.waiting.append(sequence)
        return sequence

    def cancel(self, seq_id: int) -> None:
        """The client is gone. Its stages hear of it by Evict in the next header."""
        for sequence in self.waiting:
            if sequence.seq_id == seq_id:
                self.waiting.remove(sequence)
                return
        sequence_or_none = self.running.get(seq_id)
        if sequence_or_none is not None:
            self._leave(sequence_or_none)

    def may_skip(self, seq_id: int) -> bool:
        """Whether stages may be told to skip what is on its way of a sequence nobody waits for.

        Not while a prefix entry is being made of it: of the chunks before the entry's end a stage that hears the
        signal early would run fewer than the others, and the entry would differ from stage to stage.
        """
        sequence = self.running.get(seq_id)
        return sequence is not None and sequence.saved <= sequence.passed

    # ---- out

    def next_frame(self, now: float) -> Frame | None:
        """The next frame to send, or None while there is nothing to do or the pipeline is full."""
        self._admit_waiting()
        segments = self._next_lane()
        record = self._record(segments, now)
        if not segments:
            segments = self._next_chunks()
        if not segments and not self.ops:
            return None
        return self._frame(tuple(segments), record)

    def _record(self, lane: list[Segment], now: float) -> InFlight:
        record = InFlight(now, not self.in_flight, len(lane), live=len(lane))
        if lane:
            sequence = self.running[lane[0].seq_id]
            decoding = sum(1 for s in self.running.values() if s.decoding)
            record.lanes = min(decoding, self.stages)
            record.fill = self._fill_of(sequence, decoding)
            record.follows = sequence if len(sequence.flight) > 1 else None
        return record

    def _frame(self, segments: tuple[Segment, ...], record: InFlight) -> Frame:
        frame = Frame(self.epoch, self.next_number, tuple(self.ops), segments)
        self.ops.clear()
        self.next_number += 1
        self.in_flight.append(record)
        return frame

    def _admit_waiting(self) -> None:
        while self.waiting and len(self.running) < self.capacity.sequences:
            held = sum(s.capacity for s in self.running.values())
            if held + self.waiting[0].capacity > self.capacity.kv_tokens:
                return
            sequence = self.waiting.popleft()
            self.running[sequence.seq_id] = sequence

    def _next_lane(self) -> list[Segment]:
        """Windows of the lane that has waited longest, if the pipeline has room for another."""
        decoding = [s for s in self.running.values() if s.decoding]
        lanes = sum(1 for record in self.in_flight if record.live)
        if not decoding or lanes >= self.stages:
            return []
        if self._windows_each(len(decoding)) > 1:
            return self._next_in_line(decoding)
        ready = [s for s in decoding if not s.flight]
        if not ready:
            return []
        rows = ready[: -(-len(decoding) // self.stages)]
        shape = self.controller.choose(len(rows))
        return [self._window(sequence, shape) for sequence in rows]

    def _windows_each(self, decoding: int) -> int:
        """How many windows of one sequence may be in flight: as many as leave no stage idle.

        One where prompts keep the stages busy. Never more windows than the plan has memory for: it reckons with one
        open window for each sequence it admits.
        """
        if self.stages < 2 * decoding or decoding < len(self.running):
            return 1
        room = 2 * self.capacity.sequences // decoding - 1
        return max(1, min(self.stages // decoding, room, MAX_DEPTH + 1))

    def _fill_of(self, sequence: Sequence, decoding: int) -> int:
        """The same for this one: the ratio rule knows the scores of the last drafts only, so one."""
        return 1 if sequence.request.params.ratio else self._windows_each(decoding)

    def _next_in_line(self, decoding: list[Sequence]) -> list[Segment]:
        """A window of the first sequence that may send one: to follow another in flight, or the first."""
        for sequence in decoding:
            if sequence.shape is None:
                sequence.shape = self.controller.choose(1, self._fill_of(sequence, len(decoding)))
            if sequence.may_send(sequence.shape):
                return [self._window(sequence, sequence.shape)]
        return []

    def _window(self, sequence: Sequence, shape: Shape) -> Segment:
        """The next window, asking for the drafts that are to follow; never past the request's limit."""
        self._commit(sequence)
        position = len(sequence.tokens) - 1 + sequence.ahead
        window = sequence.next_window(shape, self.next_number)
        # To the back: the next lane takes the others first.
        self.running[sequence.seq_id] = self.running.pop(sequence.seq_id)
        return Segment(
            sequence.seq_id,
            window.number,
            position=position,
            tokens=window.tokens,
            open=True,
            sample=True,
            drafts=min(shape.depth, max(0, sequence.remaining - window.first - 2)),
        )

    def _next_chunks(self) -> list[Segment]:
        """Prompt chunks for one frame: the oldest prompt first, others with what is left of the budget."""
        if len(self.in_flight) > self.stages:
            return []
        budget = self.limits.step_tokens
        segments: list[Segment] = []
        for sequence in self.running.values():
            chunk = self.limits.chunk(sequence.goal)
            size = min(chunk, budget, sequence.goal - sequence.fed)
            if size <= 0:
                continue
            segments.append(self._chunk(sequence, size))
            budget -= segments[-1].width
        return segments

    def _chunk(self, sequence: Sequence, most: int) -> Segment:
        if not sequence.admitted:
            self._admit(sequence)
        start = sequence.fed
        if sequence.boundaries and start == sequence.boundaries[0]:
            self._save(sequence, tuple(sequence.tokens[: sequence.boundaries.pop(0)]))
        end = sequence.boundaries[0] if sequence.boundaries else sequence.goal
        sequence.fed = min(end, start + most)
        last = not sequence.prefilling
        return Segment(
            sequence.seq_id,
            sequence.take_window_number(),
            position=start,
            tokens=tuple(sequence.tokens[start : sequence.fed]),
            sample=last,
            drafts=min(self._first_depth(sequence), max(0, sequence.remaining - 2)) if last else 0,
        )

    def _first_depth(self, sequence: Sequence) -> int:
        """Drafts to bring along with the first token, so that its windows follow each other from the start."""
        decoding = 1 + sum(1 for s in self.running.values() if s.decoding)
        return self.controller.choose(1, self._fill_of(sequence, decoding)).depth

    def _admit(self, sequence: Sequence) -> None:
        """Make a sequence on the stages, from the longest prefix they hold."""
        self.ops.append(sequence.admit_op())
        sequence.admitted = True
        prompt = tuple(sequence.tokens)
        entry = self.prefixes.find(prompt)
        if entry is not None:
            self.ops.append(RestorePrefix(sequence.seq_id, entry.number))
            sequence.fed = sequence.passed = sequence.cached = len(entry.tokens)
        sequence.boundaries = self.prefixes.boundaries(prompt, sequence.fed, sequence.request.turn)

    def _save(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Keep what the stages hold of `sequence` now, which is the state after `tokens`."""
        entry, dropped = self.prefixes.make(tokens)
        self.ops.extend(DropPrefix(number) for number in dropped)
        if entry is not None:
            self.ops.append(SavePrefix(sequence.seq_id, entry.number))
            sequence.saved = len(tokens)

    def _commit(self, sequence: Sequence) -> None:
        if sequence.commit is not None:
            self.ops.append(sequence.commit)
            sequence.commit = None

    # ---- back

    def settle(self, frame: Frame, now: float) -> Settlement:
        """Take a frame that came back, the oldest in flight.

        Raises StaleEpochError for one of another plan, ProtocolError when it is not the oldest.
        """
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"a result of epoch {frame.epoch}, this plan is {self.epoch}")
        expected = self.next_number - len(self.in_flight)
        if frame.number != expected or len(frame.outcomes) != len(frame.segments):
            raise ProtocolError(f"frame {frame.number} returned where {expected} was expected")
        record = self.in_flight.popleft()
        self._observe(frame, record, now)
        settlement = Settlement()
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True):
            sequence = self.running.get(segment.seq_id)
            if sequence is not None:
                self._settle_segment(sequence, segment, outcome, now, settlement)
        return settlement

    def _observe(self, frame: Frame, record: InFlight, now: float) -> None:
        """Tell the controller what a lane's step cost.

        While there are fewer lanes than stages each holds up its sequences for a pass; a full pipeline holds them
        up for as long as its slowest stage takes.
        """
        seconds = sum(frame.stage_us) / 1e6
        if record.alone and not self.in_flight and record.decode_rows:
            wires = now - record.sent - seconds
            self._wires += (wires - self._wires) / (4 if self._wires else 1)
        widths = {(s.width, s.drafts) for s in frame.segments}
        if not record.live or len(widths) > 1 or any(o.cancelled for o in frame.outcomes):
            return
        ((width, drafted),) = widths
        interval = record.lanes * max(frame.stage_us) / 1e6
        full = record.lanes == self.stages > 1
        cost = StepCost(interval if full else seconds + self._wires, interval)
        if record.follows is not None:
            cost = StepCost(cost.seconds, now - record.follows.returned, ahead=True)
        self.controller.observe_step(record.decode_rows, width, drafted, cost, record.fill)

    def _settle_segment(
        self, sequence: Sequence, segment: Segment, outcome: Outcome, now: float, to: Settlement
    ) -> None:
        if segment.open:
            in_vain = not sequence.flight or sequence.flight[0].number != segment.window
            if not in_vain and not outcome.cancelled:
                self._settle_window(sequence, segment, outcome, now, to)
            return
        if outcome.cancelled:
            return
        sequence.passed = segment.position + segment.width
        progress = PrefillProgress(sequence.passed, sequence.goal, sequence.cached)
        to.events.append((sequence.seq_id, progress))
        if outcome.token is not None:
            sequence.prefilled = sequence.prefilled or now
            tokens = sequence.first_token(outcome)
            to.emit(sequence, TokenChunk(tokens, outcome.logprobs[: len(tokens)]))
            self._end(sequence, segment, outcome, now, to)

    def _settle_window(
        self, sequence: Sequence, segment: Segment, outcome: Outcome, now: float, to: Settlement
    ) -> None:
        sequence.windows += 1
        sequence.returned = now
        landing = sequence.land(outcome)
        to.judged += landing.judged
        self.controller.observe_drafts(landing.judged)
        for window in landing.void:
            self.in_flight[window.frame - self.next_number].live -= 1
        if landing.trim:
            commit = sequence.commit
            assert commit is not None
            to.rejections.append(
                Rejection(sequence.seq_id, commit.window, commit.accepted_length, landing.trim)
            )
        chunk = TokenChunk(
            landing.tokens,
            outcome.logprobs[: len(landing.tokens)],
            len(landing.judged),
            landing.accepted,
        )
        to.emit(sequence, chunk)
        self._end(sequence, segment, outcome, now, to)

    def _end(
        self, sequence: Sequence, segment: Segment, outcome: Outcome, now: float, to: Settlement
    ) -> None:
        """If its text has ended: tell the client, keep what the stages hold where that may be of use, and let them
        forget it."""
        if sequence.finished is None:
            return
        held = (*sequence.tokens[: segment.position], *segment.tokens[: outcome.accepted_length])
        to.events.append((sequence.seq_id, Finished(sequence.finished, sequence.stats(now))))
        self._commit(sequence)
        if sequence.request.continued:
            self._save(sequence, held)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        if sequence.admitted:
            self.ops.append(Evict(sequence.seq_id))

    def check(self) -> None:
        """Invariants, for tests and idle loops."""
        assert len(self.running) <= self.capacity.sequences
        assert sum(s.capacity for s in self.running.values()) <= self.capacity.kv_tokens
        for sequence in self.running.values():
            assert 0 <= sequence.fed <= sequence.goal <= len(sequence.tokens), sequence
            assert sequence.remaining > 0, sequence
            assert sequence.prefilling or len(sequence.flight) <= self.stages, sequence
