"""The coordinators of a protocol model: the real scheduler, and a script that opens speculative windows."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.generation.draft_counts import DraftCounts
from coordinator.generation.frame_outcome import FrameOutcome
from coordinator.generation.request import Finished, GenerationRequest, TokenChunk
from coordinator.generation.scheduler import Scheduler
from coordinator.generation.sequence import Sequence as ScheduledSequence
from coordinator.generation.sequence import Window
from coordinator.planning.capacity import Capacity
from proto.errors import StaleEpochError
from proto.frame import Admit, Commit, Evict, Frame, Op, Outcome, Segment
from tests.support.protocol.model import News, op_key
from tests.support.stages.token_stages import Chooser, guesses, truth
from worker.engine.stage_engine import StageEngine

ROOM = Capacity(sequences=2, kv_tokens=64, prefix_bytes=0)
PROMPT = 2
"""Tokens of every prompt."""


@dataclass
class Scheduled:
    """The real scheduler at the head of a world. `received` holds the tokens that each client got."""

    scheduler: Scheduler
    to_come: tuple[GenerationRequest, ...]
    leaves: int = 0
    room: Capacity = ROOM
    requests: tuple[GenerationRequest, ...] = ()
    """Submitted requests, by sequence."""
    received: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Sequences that have ended or whose client has left."""
    stopped: set[int] = field(default_factory=set)
    """Sequences that a stop token has ended."""

    @property
    def epoch(self) -> int:
        """Epoch of the present plan."""
        return self.scheduler.epoch

    def clone(self) -> Scheduled:
        """Return a copy that shares no mutable state."""
        plan = (self.scheduler.limits, self.scheduler.controller, self.room)
        memo = {id(item): item for item in (*plan, *self.to_come, *self.requests)}
        received = {seq_id: list(tokens) for seq_id, tokens in self.received.items()}
        return Scheduled(
            copy.deepcopy(self.scheduler, memo),
            self.to_come,
            self.leaves,
            self.room,
            self.requests,
            received,
            set(self.ended),
            set(self.stopped),
        )

    def _live(self) -> list[ScheduledSequence]:
        return [*self.scheduler.running.values(), *self.scheduler.waiting]

    def key(self) -> Hashable:
        """Return a value that tells two states apart."""
        s = self.scheduler
        live = tuple(
            tuple(_hashable(v) for k, v in vars(one).items() if k != "request")
            for one in self._live()
        )
        received = tuple((seq_id, tuple(tokens)) for seq_id, tokens in self.received.items())
        flight = tuple((f.alone, f.decode_rows, f.valid_windows) for f in s.in_flight)
        prefixes = tuple((e.number, e.tokens) for e in s.prefixes.entries.values())
        return (
            (s.epoch, s.stages, s.next_number, tuple(map(op_key, s.ops)), flight, prefixes),
            s.prompts.order.other_frames,
            (live, len(s.running), received, frozenset(self.ended), len(self.to_come), self.leaves),
        )

    def actions(self) -> list[str]:
        """Return the actions that clients may take now."""
        open_ones = [seq_id for seq_id in self.received if seq_id not in self.ended]
        leave = [f"leave {seq_id}" for seq_id in open_ones] if self.leaves else []
        return [*(["submit"] if self.to_come else []), *leave]

    def act(self, action: str) -> list[News]:
        """Carry out an action of a client. Return the signals for the stages."""
        word, _, number = action.partition(" ")
        if word == "submit":
            request, self.to_come = self.to_come[0], self.to_come[1:]
            self.received[self.scheduler.submit(request, 0.0).seq_id] = []
            self.requests = (*self.requests, request)
            return []
        seq_id = int(number)
        self.leaves -= 1
        self.ended.add(seq_id)
        news = [News(seq_id)] if self.scheduler.can_skip(seq_id) else []
        self.scheduler.cancel_sequence(seq_id)
        return news

    def next_frame(self) -> Frame | None:
        """Return the frame that is sent at once, or None."""
        return self.scheduler.next_frame(0.0)

    def can_send(self) -> bool:
        """Return whether the script may send a frame now."""
        return False

    def send(self, chooser: Chooser) -> Frame:
        """Raise: the scheduler sends its frames at once."""
        raise NotImplementedError

    def apply_outcomes(self, frame: Frame) -> list[News]:
        """Apply the outcomes of a returned frame. Return the signals for the stages."""
        outcome = self.scheduler.apply_outcomes(frame, 0.0)
        self._record_events(outcome)
        return [News(r.seq_id, r.window, r.accepted_length) for r in outcome.rollbacks]

    def _record_events(self, outcome: FrameOutcome) -> None:
        for seq_id, event in outcome.events:
            assert seq_id not in self.ended, "an event after the end"
            if isinstance(event, TokenChunk):
                self.received[seq_id] += event.tokens
            if isinstance(event, Finished):
                request, count = self.requests[seq_id], len(self.received[seq_id])
                if event.reason == "stop":
                    start = len(request.prompt)
                    assert truth(seq_id, start + count + 1)[-1] in request.stop_tokens
                    self.stopped.add(seq_id)
                else:
                    assert event.reason == "length" and count == request.max_tokens
                self.ended.add(seq_id)

    def reset(self, stages: int, epoch: int) -> None:
        """Start a new plan."""
        self._record_events(self.scheduler.reset(stages, epoch, self.room, 0.0))

    def known(self, seq_id: int) -> int:
        """Return how many tokens of a sequence are known, including the prompt."""
        tokens = len(self.requests[seq_id].prompt) + len(self.received[seq_id])
        return tokens + (seq_id in self.stopped)  # no client receives a stop token

    def done(self) -> bool:
        """Return whether every request has ended and nothing is in flight."""
        s = self.scheduler
        idle = not (self.to_come or s.running or s.waiting or s.ops or s.in_flight)
        return idle and self.received.keys() == self.ended

    def check(self, stages: Sequence[StageEngine], *, at_rest: bool) -> None:
        """Assert that clients got the right text, and that at rest no sequence waits for a frame."""
        self.scheduler.check()
        assert not (at_rest and self.scheduler.running), (
            "a sequence waits, and no frame is in flight"
        )
        for seq_id, tokens in self.received.items():
            prompt = len(self.requests[seq_id].prompt)
            assert tokens == truth(seq_id, prompt + len(tokens))[prompt:]


def _hashable(value: Any) -> Hashable:
    if isinstance(value, DraftCounts):
        return tuple(value.drafted), tuple(value.accepted)
    if isinstance(value, deque) and value and isinstance(value[0], Window):
        return tuple((window, window.frame.number) for window in value)
    return tuple(value) if isinstance(value, (list, deque)) else value


@dataclass(frozen=True)
class SpeculativeSequence:
    """One sequence of a SpeculativeScript. `known` holds the prompt and all emitted tokens.

    The last token of `known` is in no committed window. `open` holds the valid windows in flight, oldest first.
    `invalidated` counts the others in flight.
    """

    seq_id: int
    known: tuple[int, ...]
    open: tuple[Segment, ...] = ()
    invalidated: int = 0
    next_window: int = 0
    commit: Commit | None = None
    admitted: bool = False

    @property
    def end(self) -> int:
        """Position of the next window."""
        if self.open:
            return self.open[-1].position + self.open[-1].width
        return len(self.known) - 1


@dataclass
class SpeculativeScript:
    """A script that keeps up to two windows of each sequence open. The second one is speculative.

    It covers what the filled pipeline of DESIGN section 7 asks of the protocol. `lengths` holds the tokens of each
    text, including the prompt. Windows have up to `width` tokens.
    """

    sequences: tuple[SpeculativeSequence, ...]
    lengths: tuple[int, ...]
    width: int = 2
    epoch: int = 0
    next_number: int = 0
    in_flight: deque[int] = field(default_factory=deque)

    @classmethod
    def of(cls, *lengths: int) -> SpeculativeScript:
        """Return a script with a sequence for each of `lengths`."""
        return cls(
            tuple(SpeculativeSequence(i, tuple(truth(i, PROMPT))) for i in range(len(lengths))),
            lengths,
        )

    def clone(self) -> SpeculativeScript:
        """Return a copy that shares no mutable state."""
        return replace(self, in_flight=deque(self.in_flight))

    def key(self) -> Hashable:
        """Return a value that tells two states apart."""
        return self.sequences, self.epoch, self.next_number, tuple(self.in_flight)

    def actions(self) -> list[str]:
        """Return the actions that clients may take now."""
        return []

    def act(self, action: str) -> list[News]:
        """Carry out an action of a client. Return the signals for the stages."""
        raise NotImplementedError(action)

    def next_frame(self) -> Frame | None:
        """Return the frame that is sent at once, or None."""
        return None

    # ---- out

    def can_send(self) -> bool:
        """Return whether the script may send a frame now."""
        return any(map(self._can_send_sequence, self.sequences))

    def _can_send_sequence(self, sequence: SpeculativeSequence) -> bool:
        if not sequence.admitted:
            return True
        if self._missing(sequence) == 0:  # complete: send the last commit, then, at rest, Evict
            return sequence.commit is not None or not self.in_flight
        return sequence.next_window > 0 and len(sequence.open) < 2 and self._room(sequence) > 0

    def _missing(self, sequence: SpeculativeSequence) -> int:
        return self.lengths[sequence.seq_id] - len(sequence.known)

    def _room(self, sequence: SpeculativeSequence) -> int:
        prefilling = bool(sequence.open) and not sequence.open[0].open
        return (
            0 if prefilling else min(self.width, self.lengths[sequence.seq_id] - 1 - sequence.end)
        )

    def send(self, chooser: Chooser) -> Frame:
        """Send a frame for one of the sequences that may send, or for all of them."""
        ready = [sequence for sequence in self.sequences if self._can_send_sequence(sequence)]
        way = chooser.pick(len(ready) + 1) if len(ready) > 1 else 0
        ops: list[Op] = []
        segments: list[Segment] = []
        for sequence in ready if way == len(ready) else [ready[way]]:
            self._add(sequence, ops, segments, chooser)
        frame = Frame(self.epoch, self.next_number, tuple(ops), tuple(segments))
        self.in_flight.append(self.next_number)
        self.next_number += 1
        return frame

    def _add(
        self,
        sequence: SpeculativeSequence,
        ops: list[Op],
        segments: list[Segment],
        chooser: Chooser,
    ) -> None:
        if not sequence.admitted:
            ops.append(Admit(sequence.seq_id, self.lengths[sequence.seq_id], PROMPT))
            segment = Segment(sequence.seq_id, 0, 0, sequence.known, sample=True)
        elif sequence.commit is None and self._missing(sequence) == 0:
            ops.append(Evict(sequence.seq_id))
            self._forget(sequence)
            return
        else:
            if sequence.commit is not None:
                ops.append(sequence.commit)
            if self._missing(sequence) == 0:
                self._put(replace(sequence, commit=None))
                return
            segment = self._window(sequence, chooser)
        segments.append(segment)
        self._put(
            replace(
                sequence,
                admitted=True,
                commit=None,
                open=(*sequence.open, segment),
                next_window=sequence.next_window + 1,
            )
        )

    def _window(self, sequence: SpeculativeSequence, chooser: Chooser) -> Segment:
        width = 1 + chooser.pick(self._room(sequence))
        at = sequence.end
        sure = sequence.known[at : at + 1]  # confirmed, where no window is open before it
        tokens = (*sure, *guesses(sequence.seq_id, at + len(sure), width - len(sure), chooser))
        return Segment(sequence.seq_id, sequence.next_window, at, tokens, open=True, sample=True)

    # ---- back

    def apply_outcomes(self, frame: Frame) -> list[News]:
        """Apply the outcomes of a returned frame. Return the signals for the stages."""
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"a result of epoch {frame.epoch} in epoch {self.epoch}")
        assert frame.number == self.in_flight.popleft()
        news: list[News] = []
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True):
            (sequence,) = [h for h in self.sequences if h.seq_id == segment.seq_id]
            if outcome.cancelled:
                assert sequence.invalidated, "a valid window was skipped"
                self._put(replace(sequence, invalidated=sequence.invalidated - 1))
                continue
            assert not sequence.invalidated, "an invalidated window ran"
            news += self._take(sequence, segment, outcome)
        return news

    def _take(
        self, sequence: SpeculativeSequence, segment: Segment, outcome: Outcome
    ) -> list[News]:
        assert sequence.open[0].window == segment.window
        known = sequence.known
        if outcome.token is not None:
            accepted_length = segment.tokens[: outcome.accepted_length]
            known = (*known[: segment.position], *accepted_length, outcome.token)
        assert known[: len(sequence.known)] == sequence.known, "a token was taken back"
        assert list(known) == truth(sequence.seq_id, len(known))
        sequence = replace(sequence, known=known, open=sequence.open[1:])
        if segment.open:
            sequence = replace(
                sequence, commit=Commit(sequence.seq_id, segment.window, outcome.accepted_length)
            )
        if outcome.accepted_length == segment.width:
            self._put(sequence)
            return []
        self._put(replace(sequence, open=(), invalidated=len(sequence.open)))
        return [News(sequence.seq_id, segment.window, outcome.accepted_length)]

    # ---- its sequences

    def _put(self, sequence: SpeculativeSequence) -> None:
        self.sequences = tuple(
            sequence if h.seq_id == sequence.seq_id else h for h in self.sequences
        )

    def _forget(self, sequence: SpeculativeSequence) -> None:
        self.sequences = tuple(h for h in self.sequences if h.seq_id != sequence.seq_id)

    def reset(self, stages: int, epoch: int) -> None:
        """Start a new plan."""
        self.epoch, self.next_number = epoch, 0
        self.in_flight.clear()
        self.sequences = tuple(
            SpeculativeSequence(h.seq_id, h.known) for h in self.sequences if self._missing(h)
        )

    def known(self, seq_id: int) -> int:
        """Return how many tokens of a sequence are known, including the prompt."""
        return next(len(h.known) for h in self.sequences if h.seq_id == seq_id)

    def done(self) -> bool:
        """Return whether every request has ended and nothing is in flight."""
        return not self.sequences and not self.in_flight

    def check(self, stages: Sequence[StageEngine], *, at_rest: bool) -> None:
        """Assert that at rest, without a pending commit, every stage has committed all known tokens but the last."""
        for sequence in self.sequences:
            if at_rest and sequence.admitted and sequence.commit is None:
                lengths = {stage.sequences[sequence.seq_id].stack.committed for stage in stages}
                assert lengths == {len(sequence.known) - 1}, lengths
