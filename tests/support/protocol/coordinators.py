"""Coordinators of a protocol model: the real scheduler, and a script that opens windows on hope."""

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
    """The real scheduler at the head of a world. `told` is what each client heard."""

    scheduler: Scheduler
    to_come: tuple[GenerationRequest, ...]
    leaves: int = 0
    room: Capacity = ROOM
    requests: tuple[GenerationRequest, ...] = ()
    """Those submitted, by sequence."""
    told: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Who has heard the end, or left."""

    @property
    def epoch(self) -> int:
        return self.scheduler.epoch

    def clone(self) -> Scheduled:
        plan = (self.scheduler.limits, self.scheduler.controller, self.room)
        memo = {id(item): item for item in (*plan, *self.to_come, *self.requests)}
        told = {seq_id: list(tokens) for seq_id, tokens in self.told.items()}
        return Scheduled(
            copy.deepcopy(self.scheduler, memo),
            self.to_come,
            self.leaves,
            self.room,
            self.requests,
            told,
            set(self.ended),
        )

    def _live(self) -> list[ScheduledSequence]:
        return [*self.scheduler.running.values(), *self.scheduler.waiting]

    def key(self) -> Hashable:
        s = self.scheduler
        live = tuple(
            tuple(_hashable(v) for k, v in vars(one).items() if k != "request")
            for one in self._live()
        )
        told = tuple((seq_id, tuple(tokens)) for seq_id, tokens in self.told.items())
        flight = tuple((f.alone, f.decode_rows, f.valid_windows) for f in s.in_flight)
        prefixes = tuple((e.number, e.tokens) for e in s.prefixes.entries.values())
        return (
            (s.epoch, s.stages, s.next_number, tuple(map(op_key, s.ops)), flight, prefixes),
            (live, len(s.running), told, frozenset(self.ended), len(self.to_come), self.leaves),
        )

    def actions(self) -> list[str]:
        open_ones = [seq_id for seq_id in self.told if seq_id not in self.ended]
        leave = [f"leave {seq_id}" for seq_id in open_ones] if self.leaves else []
        return [*(["submit"] if self.to_come else []), *leave]

    def act(self, action: str) -> list[News]:
        word, _, number = action.partition(" ")
        if word == "submit":
            request, self.to_come = self.to_come[0], self.to_come[1:]
            self.told[self.scheduler.submit(request, 0.0).seq_id] = []
            self.requests = (*self.requests, request)
            return []
        seq_id = int(number)
        self.leaves -= 1
        self.ended.add(seq_id)
        news = [News(seq_id)] if self.scheduler.can_skip(seq_id) else []
        self.scheduler.cancel_sequence(seq_id)
        return news

    def next_frame(self) -> Frame | None:
        return self.scheduler.next_frame(0.0)

    def can_send(self) -> bool:
        return False

    def send(self, chooser: Chooser) -> Frame:
        raise NotImplementedError

    def apply_outcomes(self, frame: Frame) -> list[News]:
        outcome = self.scheduler.apply_outcomes(frame, 0.0)
        self._tell(outcome)
        return [News(r.seq_id, r.window, r.accepted_length) for r in outcome.rollbacks]

    def _tell(self, outcome: FrameOutcome) -> None:
        for seq_id, event in outcome.events:
            assert seq_id not in self.ended, "said after the end"
            if isinstance(event, TokenChunk):
                self.told[seq_id] += event.tokens
            if isinstance(event, Finished):
                assert event.reason == "length"
                assert len(self.told[seq_id]) == self.requests[seq_id].max_tokens
                self.ended.add(seq_id)

    def reset(self, stages: int, epoch: int) -> None:
        self._tell(self.scheduler.reset(stages, epoch, self.room, 0.0))

    def known(self, seq_id: int) -> int:
        return len(self.requests[seq_id].prompt) + len(self.told[seq_id])

    def done(self) -> bool:
        s = self.scheduler
        idle = not (self.to_come or s.running or s.waiting or s.ops or s.in_flight)
        return idle and self.told.keys() == self.ended

    def check(self, stages: Sequence[StageEngine], *, at_rest: bool) -> None:
        """Clients heard the text so far. The next frame leaves at once, so that at rest nobody waits for one."""
        self.scheduler.check()
        assert not (at_rest and self.scheduler.running), "someone waits, and no frame is on its way"
        for seq_id, tokens in self.told.items():
            prompt = len(self.requests[seq_id].prompt)
            assert tokens == truth(seq_id, prompt + len(tokens))[prompt:]


def _hashable(value: Any) -> Hashable:
    if isinstance(value, DraftCounts):
        return tuple(value.drafted), tuple(value.accepted)
    if isinstance(value, deque) and value and isinstance(value[0], Window):
        return tuple((window, window.frame.number) for window in value)
    return tuple(value) if isinstance(value, (list, deque)) else value


@dataclass(frozen=True)
class Hope:
    """One sequence of a `Hopeful`. `known` are the prompt and what was said since; the last is in no settled window.

    `open` are the windows under way that may stand, the oldest first; `doomed` counts those that cannot.
    """

    seq_id: int
    known: tuple[int, ...]
    open: tuple[Segment, ...] = ()
    doomed: int = 0
    next_window: int = 0
    commit: Commit | None = None
    admitted: bool = False

    @property
    def end(self) -> int:
        """Where the next window would stand."""
        if self.open:
            return self.open[-1].position + self.open[-1].width
        return len(self.known) - 1


@dataclass
class Hopeful:
    """Keeps up to two windows of each of its sequences open, the second on the hope that the first is kept whole.

    What the filled pipeline of DESIGN section 7 asks of the protocol. Of each sequence as many tokens are wanted as
    `lengths` says, the prompt included; windows have up to `width` tokens.
    """

    sequences: tuple[Hope, ...]
    lengths: tuple[int, ...]
    width: int = 2
    epoch: int = 0
    next_number: int = 0
    in_flight: deque[int] = field(default_factory=deque)

    @classmethod
    def of(cls, *lengths: int) -> Hopeful:
        return cls(tuple(Hope(i, tuple(truth(i, PROMPT))) for i in range(len(lengths))), lengths)

    def clone(self) -> Hopeful:
        return replace(self, in_flight=deque(self.in_flight))

    def key(self) -> Hashable:
        return self.sequences, self.epoch, self.next_number, tuple(self.in_flight)

    def actions(self) -> list[str]:
        return []

    def act(self, action: str) -> list[News]:
        raise NotImplementedError(action)

    def next_frame(self) -> Frame | None:
        return None

    # ---- out

    def can_send(self) -> bool:
        return any(map(self._may_go, self.sequences))

    def _may_go(self, hope: Hope) -> bool:
        if not hope.admitted:
            return True
        if self._missing(hope) == 0:  # all is said: the last commit, then, at rest, Evict
            return hope.commit is not None or not self.in_flight
        return hope.next_window > 0 and len(hope.open) < 2 and self._room(hope) > 0

    def _missing(self, hope: Hope) -> int:
        return self.lengths[hope.seq_id] - len(hope.known)

    def _room(self, hope: Hope) -> int:
        prefilling = bool(hope.open) and not hope.open[0].open
        return 0 if prefilling else min(self.width, self.lengths[hope.seq_id] - 1 - hope.end)

    def send(self, chooser: Chooser) -> Frame:
        """A frame for one of the sequences that may go, or for all of them."""
        ready = [hope for hope in self.sequences if self._may_go(hope)]
        way = chooser.pick(len(ready) + 1) if len(ready) > 1 else 0
        ops: list[Op] = []
        segments: list[Segment] = []
        for hope in ready if way == len(ready) else [ready[way]]:
            self._add(hope, ops, segments, chooser)
        frame = Frame(self.epoch, self.next_number, tuple(ops), tuple(segments))
        self.in_flight.append(self.next_number)
        self.next_number += 1
        return frame

    def _add(self, hope: Hope, ops: list[Op], segments: list[Segment], chooser: Chooser) -> None:
        if not hope.admitted:
            ops.append(Admit(hope.seq_id, self.lengths[hope.seq_id], PROMPT))
            segment = Segment(hope.seq_id, 0, 0, hope.known, sample=True)
        elif hope.commit is None and self._missing(hope) == 0:
            ops.append(Evict(hope.seq_id))
            self._forget(hope)
            return
        else:
            if hope.commit is not None:
                ops.append(hope.commit)
            if self._missing(hope) == 0:
                self._put(replace(hope, commit=None))
                return
            segment = self._window(hope, chooser)
        segments.append(segment)
        self._put(
            replace(
                hope,
                admitted=True,
                commit=None,
                open=(*hope.open, segment),
                next_window=hope.next_window + 1,
            )
        )

    def _window(self, hope: Hope, chooser: Chooser) -> Segment:
        width = 1 + chooser.pick(self._room(hope))
        at = hope.end
        sure = hope.known[at : at + 1]  # confirmed, where no window is open before it
        tokens = (*sure, *guesses(hope.seq_id, at + len(sure), width - len(sure), chooser))
        return Segment(hope.seq_id, hope.next_window, at, tokens, open=True, sample=True)

    # ---- back

    def apply_outcomes(self, frame: Frame) -> list[News]:
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"a result of epoch {frame.epoch} in epoch {self.epoch}")
        assert frame.number == self.in_flight.popleft()
        news: list[News] = []
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True):
            (hope,) = [h for h in self.sequences if h.seq_id == segment.seq_id]
            if outcome.cancelled:
                assert hope.doomed, "a window was skipped that may stand"
                self._put(replace(hope, doomed=hope.doomed - 1))
                continue
            assert not hope.doomed, "a window ran that cannot stand"
            news += self._take(hope, segment, outcome)
        return news

    def _take(self, hope: Hope, segment: Segment, outcome: Outcome) -> list[News]:
        assert hope.open[0].window == segment.window
        known = hope.known
        if outcome.token is not None:
            accepted_length = segment.tokens[: outcome.accepted_length]
            known = (*known[: segment.position], *accepted_length, outcome.token)
        assert known[: len(hope.known)] == hope.known, "a token was taken back"
        assert list(known) == truth(hope.seq_id, len(known))
        hope = replace(hope, known=known, open=hope.open[1:])
        if segment.open:
            hope = replace(
                hope, commit=Commit(hope.seq_id, segment.window, outcome.accepted_length)
            )
        if outcome.accepted_length == segment.width:
            self._put(hope)
            return []
        self._put(replace(hope, open=(), doomed=len(hope.open)))
        return [News(hope.seq_id, segment.window, outcome.accepted_length)]

    # ---- its sequences

    def _put(self, hope: Hope) -> None:
        self.sequences = tuple(hope if h.seq_id == hope.seq_id else h for h in self.sequences)

    def _forget(self, hope: Hope) -> None:
        self.sequences = tuple(h for h in self.sequences if h.seq_id != hope.seq_id)

    def reset(self, stages: int, epoch: int) -> None:
        self.epoch, self.next_number = epoch, 0
        self.in_flight.clear()
        self.sequences = tuple(Hope(h.seq_id, h.known) for h in self.sequences if self._missing(h))

    def known(self, seq_id: int) -> int:
        return next(len(h.known) for h in self.sequences if h.seq_id == seq_id)

    def done(self) -> bool:
        return not self.sequences and not self.in_flight

    def check(self, stages: Sequence[StageEngine], *, at_rest: bool) -> None:
        """At rest, with no commit due, every stage has committed what the coordinator knows, less the last token."""
        for hope in self.sequences:
            if at_rest and hope.admitted and hope.commit is None:
                lengths = {stage.sequences[hope.seq_id].stack.committed for stage in stages}
                assert lengths == {len(hope.known) - 1}, lengths
