"""A model of the pipeline's protocol: a world of few states, walked exhaustively.

A world is a coordinator, a chain of real `FrameEngine`s without a model, and the channels between them. The walk takes
every possible step from every state. A frame passes a stage or returns. A signal reaches a stage (again, late, or
never). A request arrives or its client leaves. The plan ends in a crash and another begins. States met before are not
walked again.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from coordinator.drafts.averages import DraftCounts
from coordinator.planning.capacity import Capacity
from coordinator.schedule.in_flight import Window
from coordinator.schedule.request import Finished, GenerationRequest, TokenChunk
from coordinator.schedule.scheduler import FrameOutcome, Scheduler
from coordinator.schedule.sequence import Sequence as ScheduledSequence
from mtp.layers.communicator import ALONE
from proto.errors import StaleEpochError
from proto.frame import (
    Admit,
    Commit,
    DropPrefix,
    Evict,
    Frame,
    Op,
    RestorePrefix,
    SavePrefix,
    decode,
    encode,
)
from proto.frame_stamps import FrameStamps, StageStep
from tests.support.stages.token_stages import (
    Chooser,
    Member,
    TokenVerifier,
    Truth,
    clone_stage,
    layers_of,
    make_stages,
    stage_key,
    tokens_of,
    truth,
)
from worker.engine.frame_engine import BegunFrame, FrameEngine, may_overlap
from worker.engine.stage_state import relayed_tokens

STAGE_US = (1000,)
"""The time of each stage. The controller reads it, and measured times would make every walk another one."""

Known = Callable[[int], int]
"""Function from a sequence to the number of its tokens that the coordinator knows, including the prompt."""


@dataclass(frozen=True)
class Ledger:
    """The ledger of one plan. Worlds share it: each entry makes another ledger.

    `headers[n]` holds, by sequence, the tokens that a stage has committed according to headers once it has done frame
    n. `prefixes` holds lengths of entries, `positions` the positions of open windows. `answered` holds, by sequence,
    the length that the last stage's newest outcome keeps. `signals` holds the lengths that rollbacks announced,
    `cancelled` the sequences whose clients have left.
    """

    headers: tuple[Mapping[int, int], ...] = ()
    prefixes: Mapping[int, int] = field(default_factory=dict)
    positions: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    decided: Mapping[int, int] = field(default_factory=dict)
    signals: frozenset[tuple[int, int]] = frozenset()
    left: frozenset[int] = frozenset()

    def key(self) -> Hashable:
        """Return a value that tells two ledgers apart."""
        return tuple(self.headers[-1].items()) if self.headers else ()

    # ---- entries

    def sent(self, frame: Frame, known: Known) -> Ledger:
        """Record a frame that leaves the coordinator. Its header commits all known tokens but the last."""
        held = dict(self._after(len(self.headers)))
        prefixes = dict(self.prefixes)
        for op in frame.ops:
            self._apply(op, held, prefixes, known)
        positions = dict(self.positions)
        for segment in frame.segments:
            if segment.open:
                positions[segment.seq_id, segment.window] = segment.position, segment.width
            else:
                held[segment.seq_id] = segment.position + segment.width
        return replace(self, headers=(*self.headers, held), prefixes=prefixes, positions=positions)

    def _apply(self, op: Op, held: dict[int, int], prefixes: dict[int, int], known: Known) -> None:
        match op:
            case Admit(seq_id):
                held[seq_id] = 0
            case Evict(seq_id):
                del held[seq_id]
            case Commit(seq_id, window, accepted_length):
                held[seq_id] = self._end(seq_id, window, accepted_length)
                assert held[seq_id] == known(seq_id) - 1, "a header commits another length"
            case SavePrefix(seq_id, entry):
                prefixes[entry] = held[seq_id]
            case RestorePrefix(seq_id, entry):
                held[seq_id] = prefixes[entry]
            case DropPrefix(entry):
                del prefixes[entry]

    def answered(self, frame: Frame) -> Ledger:
        """Record a frame that the last stage passes on."""
        decided = dict(self.decided)
        for op in frame.ops:
            if isinstance(op, Evict):  # a paused sequence begins again from its tokens
                decided.pop(op.seq_id, None)
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True):
            # The text may have ended before a window that continues, so only a header commits it.
            if segment.open and not outcome.cancelled and not segment.continues:
                decided[segment.seq_id] = self._end(segment.seq_id, segment.window, outcome.accepted_length)
        return replace(self, decided=decided)

    def rejected(self, seq_id: int, window: int, trim: int, known: Known) -> Ledger:
        """Record a rollback that is broadcast."""
        end = sum(self.positions[seq_id, window]) - trim
        assert end == known(seq_id) - 1, "a signal commits another length"
        return replace(self, signals=self.signals | {(seq_id, end)})

    def cancelled(self, seq_id: int) -> Ledger:
        """Record a client that has left."""
        return replace(self, left=self.left | {seq_id})

    def _end(self, seq_id: int, window: int, accepted_length: int) -> int:
        return self.positions[seq_id, window][0] + accepted_length

    def _after(self, frames: int) -> Mapping[int, int]:
        return self.headers[frames - 1] if frames else {}

    # ---- what must hold

    def check(self, stage: FrameEngine) -> None:
        """Assert that a stage holds the sequences that its headers left it, with the committed lengths they say.

        A signal may have committed more, and the last stage commits its own outcomes. For a sequence whose client has
        left, any length is right.
        """
        due = self._after(stage.frames_done)
        assert stage.sequences.keys() == due.keys(), (stage.sequences.keys(), due)
        for seq_id, sequence in stage.sequences.items():
            committed = sequence.stack.committed
            if seq_id in self.left:
                continue
            least = due[seq_id]
            if stage.verifier is not None:
                least = max(least, self.decided.get(seq_id, 0))
            announced = {end for one, end in self.signals if one == seq_id and end > least}
            wanted = {least, *announced}
            assert committed in wanted, (
                f"sequence {seq_id}: {committed} committed after frame {stage.frames_done - 1}, not {wanted}"
            )


@dataclass(frozen=True)
class News:
    """A signal: a rollback, or with `trim` None a cancellation."""

    seq_id: int
    window: int = 0
    trim: int | None = None


Step = Callable[["World", Chooser], None]


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

    @property
    def is_pausing(self) -> bool:
        """True while a sequence is about to give its place to another client, or waits for its return."""
        waiting = (one.window_count and not one.interrupted for one in self.scheduler.waiting)
        return any(waiting) or any(one.pausing for one in self.scheduler.running.values())

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
        live = tuple(tuple(_hashable(v) for k, v in vars(one).items() if k != "request") for one in self._live())
        received = tuple((seq_id, tuple(tokens)) for seq_id, tokens in self.received.items())
        flight = tuple((f.alone, f.decode_rows, f.valid_windows) for f in s.in_flight)
        prefixes = tuple((e.number, e.tokens) for e in s.prefixes.entries.values())
        return (
            (s.epoch, s.stages, s.next_number, tuple(map(op_key, s.ops)), flight, prefixes),
            s.prompts.other_frames,
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

    def apply_outcomes(self, frame: Frame) -> list[News]:
        """Apply the outcomes of a returned frame. Return the signals for the stages."""
        outcome = self.scheduler.apply_outcomes(frame, 0.0)
        self._record_events(outcome)
        return [News(r.seq_id, r.window, r.trim) for r in outcome.rollbacks]

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

    def check(self, stages: Sequence[FrameEngine], *, at_rest: bool) -> None:
        """Assert that clients got the right text, and that at rest no sequence waits for a frame."""
        self.scheduler.check()
        assert not (at_rest and self.scheduler.running), "a sequence waits, and no frame is in flight"
        for seq_id, tokens in self.received.items():
            prompt = len(self.requests[seq_id].prompt)
            assert tokens == truth(seq_id, prompt + len(tokens))[prompt:]


def _hashable(value: Any) -> Hashable:
    if isinstance(value, DraftCounts):
        return tuple(value.drafted), tuple(value.accepted)
    if isinstance(value, deque) and value and isinstance(value[0], Window):
        return tuple((window, window.frame.number) for window in value)
    return tuple(value) if isinstance(value, (list, deque)) else value


@dataclass
class World:
    """One state of everything. `channels[i]` lies before stage i, the last one before the coordinator.

    Worlds share their parts: a step copies the part it changes.
    """

    coordinator: Scheduled
    stages: list[FrameEngine]
    channels: list[deque[Frame]]
    ring: deque[Frame] = field(default_factory=deque)
    """Tokens that the last of several stages has relayed to the first."""
    news: frozenset[News] = frozenset()
    stale_frames: tuple[Frame, ...] = ()
    stale_news: frozenset[News] = frozenset()
    stale_results: tuple[Frame, ...] = ()
    """The frames of `stale_frames` that had passed all stages."""
    stale_tokens: tuple[Frame, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    crashes: int = 0
    """Maximum number of crashes still to come."""
    grouped: bool = False
    """True if each stage is a group of two, whose second member follows the frames of the first."""
    followers: list[FrameEngine] = field(default_factory=list)

    @classmethod
    def start(cls, coordinator: Scheduled, stages: int, crashes: int = 0, *, grouped: bool = False) -> World:
        """Return a world at its beginning."""
        world = cls(coordinator, [], [], crashes=crashes, grouped=grouped)
        world._plan(stages, 1)
        return world

    def _plan(self, stages: int, epoch: int) -> None:
        self.coordinator.reset(stages, epoch)
        self.stages = make_stages(stages, epoch, Member(0, 2) if self.grouped else ALONE)
        self.followers = make_stages(stages, epoch, Member(1, 2)) if self.grouped else []
        self.channels = [deque() for _ in range(stages + 1)]
        self.ring = deque()
        self.ledger = Ledger()
        self._pump()

    def clone(self) -> World:
        """Return a copy whose parts are shared until a step changes them."""
        clone = copy.copy(self)
        clone.stages = list(self.stages)
        clone.followers = list(self.followers)
        clone.channels = [deque(channel) for channel in self.channels]
        clone.ring = deque(self.ring)
        return clone

    def key(self) -> int:
        """Return a hash that tells two worlds apart."""
        return hash(
            (
                self.coordinator.key(),
                tuple(map(stage_key, (*self.stages, *self.followers))),
                tuple(tuple(map(_frame_key, channel)) for channel in (*self.channels, self.ring)),
                self.news,
                self.ledger.key(),
                self.crashes,
                tuple(frame.number for frame in self.stale_frames),
                len(self.stale_results),
                tuple(frame.number for frame in self.stale_tokens),
                self.stale_news,
            )
        )

    # ---- steps

    def steps(self) -> Iterator[tuple[str, Step]]:
        """Yield every possible step. A signal that would change nothing is no step."""
        for action in self.coordinator.actions():
            yield action, partial(World.act, action=action)
        for at, channel in enumerate(self.channels):
            if channel and not (at == 0 and self.stages[0].lacks_tokens(channel[0])):
                yield f"pass {at}", partial(World.pass_on, at=at)
        if self.ring:
            yield "relay", World.relay
        ahead = len(self.stages) == 1 and len(self.channels[0]) > 1
        if ahead and may_overlap(self.channels[0][1]):
            yield "ahead", partial(World.run_ahead, news=None)
            for news in self.news:
                yield f"ahead of {news}", partial(World.run_ahead, news=news)
        for stage, news in product(range(len(self.stages)), self.news):
            if self._matters(stage, news):
                yield f"{news} to {stage}", partial(World.deliver, stage=stage, news=news)
        if self.crashes:
            for left in range(max(1, len(self.stages) - 1), len(self.stages) + 1):
                yield f"crash, {left} left", partial(World.crash, left=left)

    def _matters(self, stage: int, news: News) -> bool:
        tried = clone_stage(self.stages[stage])
        deliver(tried, self.coordinator.epoch, news)
        return stage_key(tried) != stage_key(self.stages[stage])

    def _pump(self) -> None:
        while (frame := self.coordinator.next_frame()) is not None:
            self._put(frame)

    def _put(self, frame: Frame) -> None:
        self.ledger = self.ledger.sent(frame, self.coordinator.known)
        self.channels[0].append(frame)

    def _announce(self, news: list[News]) -> None:
        self.news |= set(news)
        for one in news:
            if one.trim is None:
                self.ledger = self.ledger.cancelled(one.seq_id)
            else:
                self.ledger = self.ledger.rejected(one.seq_id, one.window, one.trim, self.coordinator.known)

    def act(self, _: Chooser, *, action: str) -> None:
        """Let a client act."""
        self.coordinator = self.coordinator.clone()
        self._announce(self.coordinator.act(action))
        self._pump()

    def pass_on(self, chooser: Chooser, *, at: int) -> None:
        """Let the frame at the head of a channel pass the next stage, or return."""
        frame = self.channels[at].popleft()
        if at == len(self.stages):
            self.coordinator = self.coordinator.clone()
            self._announce(self.coordinator.apply_outcomes(replace(frame, stage_us=STAGE_US * len(self.stages))))
            self._pump()
            return
        stage = self.stages[at] = clone_stage(self.stages[at])
        if isinstance(stage.verifier, TokenVerifier):
            stage.verifier.text = Truth(chooser)
        picked, decided = len(chooser.made), list[Frame]()
        stage.announce = decided.append if self.grouped else None
        out = stage.process(frame)
        if self.grouped:
            self._follow(at, decided[0], out, chooser.made[picked:])
        self.channels[at + 1].append(out)
        if stage.verifier is not None:
            self.ledger = self.ledger.answered(out)
            message = relayed_tokens(out) if len(self.stages) > 1 else None
            self.ring += [] if message is None else [message]

    def _follow(self, at: int, decided: Frame, out: Frame, picks: Sequence[int]) -> None:
        """Let the second member of a stage run a frame that the first one has decided. Both run the same rows."""
        follower = self.followers[at] = clone_stage(self.followers[at])
        if isinstance(follower.verifier, TokenVerifier):
            follower.verifier.text = Truth(Chooser(picks))
        followed = follower.process(decode(encode(decided)))
        assert [s.rows for s in followed.segments] == [s.rows for s in out.segments]
        assert followed.outcomes == out.outcomes
        assert followed.tensor == out.tensor

    def relay(self, _: Chooser) -> None:
        """Let the first stage receive tokens of the last."""
        stage = self.stages[0] = clone_stage(self.stages[0])
        stage.receive_tokens(self.ring.popleft())

    def run_ahead(self, _: Chooser, *, news: News | None) -> None:
        """Let a single stage begin the second frame of its channel before it has finished the first.

        A signal may reach it between both. The second member of a group finishes the first frame before or after.
        """
        stage = self.stages[0] = clone_stage(self.stages[0])
        decided, begun = list[Frame](), list[BegunFrame]()
        stage.announce = decided.append if self.grouped else None
        for number in range(2):
            frame = self.channels[0].popleft()
            ends = [] if number and stage.can_run_ahead(frame) else [_end(one) for one in begun]
            begun.append(stage.begin_frame(frame, FrameStamps(0, StageStep)))
            if news is not None and number == 0:
                deliver(stage, self.coordinator.epoch, news)
        outs = [*ends, *(_end(one) for one in begun[len(ends) :])]
        self.channels[1] += outs
        for out in outs:
            self.ledger = self.ledger.answered(out)
        if self.grouped:
            self._follow_ahead(decided, outs)

    def _follow_ahead(self, decided: Sequence[Frame], outs: Sequence[Frame]) -> None:
        """Let the second member run both frames of `run_ahead`, one after the other and overlapping."""
        behind, ahead = (clone_stage(self.followers[0]) for _ in "12")
        followed = [behind.process(frame) for frame in decided]
        begun = [ahead.begin_frame(frame, FrameStamps(0, StageStep)) for frame in decided]
        overlapped = [_end(one) for one in begun]
        for ours in (followed, overlapped):
            assert [out.outcomes for out in ours] == [out.outcomes for out in outs]
        assert stage_key(behind) == stage_key(ahead)
        self.followers[0] = ahead

    def deliver(self, _: Chooser, *, stage: int, news: News) -> None:
        """Let a signal reach a stage."""
        self.stages[stage] = clone_stage(self.stages[stage])
        deliver(self.stages[stage], self.coordinator.epoch, news)

    def crash(self, _: Chooser, *, left: int) -> None:
        """Lose every stage and frame of the plan. The next plan has `left` stages."""
        self.crashes -= 1
        self.stale_frames = tuple(frame for channel in self.channels for frame in channel)
        self.stale_results = tuple(self.channels[-1])
        self.stale_tokens = tuple(self.ring)
        self.stale_news, self.news = self.news, frozenset()
        self.coordinator = self.coordinator.clone()
        self._plan(left, self.coordinator.epoch + 1)

    # ---- what must hold

    def check(self) -> None:
        """Assert the contract of every state."""
        for stage in self.stages:
            for seq_id, sequence in stage.sequences.items():
                sequence.stack.check()
                held, stack = tokens_of(sequence), sequence.stack
                assert len(held) == stack.length
                assert len(layers_of(sequence.layers)[1].taped) == len(stack.windows)
                assert held[: stack.committed] == truth(seq_id, stack.committed), held
            for prefix in stage.prefixes.values():
                assert tokens_of(prefix) == truth(0, prefix.length), tokens_of(prefix)
            self.ledger.check(stage)
            self._check_stale(stage)
        pairs = zip(self.stages, self.followers, strict=True) if self.grouped else ()
        for first, other in pairs:
            # A signal reaches the first member alone. The next header trims the others.
            assert first.sequences.keys() == other.sequences.keys()
            for seq_id, sequence in first.sequences.items():
                held, ours = tokens_of(other.sequences[seq_id]), tokens_of(sequence)
                assert held[: len(ours)] == ours, (held, ours)
        self._check_stale_results()
        self.coordinator.check(self.stages, at_rest=not any(self.channels))

    def _check_stale(self, stage: FrameEngine) -> None:
        """Assert that frames and signals of an older plan change nothing, at any time."""
        if not self.stale_frames and not self.stale_news and not self.stale_tokens:
            return
        before = stage_key(stage)
        for frame in self.stale_frames:
            try:
                stage.process(frame)
            except StaleEpochError:
                continue
            raise AssertionError(f"a frame of epoch {frame.epoch} ran in epoch {stage.epoch}")
        for message in self.stale_tokens if stage.relayed is not None else ():
            try:
                stage.receive_tokens(message)
            except StaleEpochError:
                continue
            raise AssertionError(f"tokens of epoch {message.epoch} were kept in {stage.epoch}")
        for news in self.stale_news:
            deliver(stage, self.coordinator.epoch - 1, news)
        assert stage_key(stage) == before

    def _check_stale_results(self) -> None:
        """Assert that the coordinator ignores results of an older plan."""
        before = self.coordinator.key() if self.stale_results else None
        for frame in self.stale_results:
            try:
                self.coordinator.apply_outcomes(frame)
            except StaleEpochError:
                assert self.coordinator.key() == before
                continue
            raise AssertionError(f"a result of epoch {frame.epoch} was applied")

    def check_end(self) -> None:
        """Assert the contract of an end: all requests have ended, and nothing is left."""
        assert self.coordinator.done(), "requests are left, and no step is possible"
        assert not any(self.channels) and not self.ring
        for stage in (*self.stages, *self.followers):
            assert not stage.sequences, stage.sequences
            assert list(stage.prefixes) == list(self.stages[0].prefixes)
            assert stage.frames_done == self.stages[0].frames_done


def _end(begun: BegunFrame) -> Frame:
    """Finish a frame and clean up behind it."""
    out = begun.finish_frame()
    begun.clean_up()
    return out


def deliver(stage: FrameEngine, epoch: int, news: News) -> None:
    """Apply a signal to a stage."""
    if news.trim is None:
        stage.cancel(epoch, news.seq_id)
    else:
        stage.rollback(epoch, news.seq_id, news.window, news.trim)


def op_key(op: Op) -> Hashable:
    """Return an operation without its sampling parameters, which hold a dict and are the same in all worlds."""
    if isinstance(op, Admit):
        return op.kind, op.seq_id, op.capacity, op.prompt
    return op


def _frame_key(frame: Frame) -> Hashable:
    ops = tuple(map(op_key, frame.ops))
    return frame.epoch, frame.number, ops, frame.segments, frame.outcomes


# ---- the walk


@dataclass
class Walk:
    """The counts of a walk."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    met: Counter[str] = field(default_factory=Counter)
    """Steps by kind. A kind without steps was not explored."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.met.items()))
        return f"{self.states:,} states, {self.steps:,} steps ({kinds}), {self.ends:,} ends"


def explore(start: World, most: int) -> Walk:
    """Take every step from every state.

    Raises AssertionError, with the steps that led there, if a contract is violated, or after `most` states.
    """
    walk = Walk(states=1)
    seen = {start.key()}
    stack: list[tuple[World, tuple[str, ...]]] = [(start, ())]
    while stack:
        world, path = stack.pop()
        ended = True
        for name, following in _successors(world, path, walk):
            ended = ended and name.startswith(("News", "crash"))
            key = following.key()
            if key in seen:
                continue
            seen.add(key)
            walk.states += 1
            assert walk.states <= most, f"more than {most:,} states"
            _judge(World.check, following, (*path, name))
            stack.append((following, (*path, name)))
        if ended:
            walk.ends += 1
            _judge(World.check_end, world, path)
    return walk


def _successors(world: World, path: tuple[str, ...], walk: Walk) -> Iterator[tuple[str, World]]:
    for name, step in world.steps():
        scripts: list[tuple[int, ...]] = [()]
        while scripts:
            chooser = Chooser(scripts.pop())
            following = world.clone()
            _judge(_with(step, chooser), following, (*path, name))
            scripts += chooser.following()
            walk.steps += 1
            walk.met[name.partition("(")[0].partition(" ")[0]] += 1
            walk.met["pause"] += following.coordinator.is_pausing
            yield name, following


def _with(step: Step, chooser: Chooser) -> Callable[[World], None]:
    return lambda world: step(world, chooser)


def _judge(check: Callable[[World], None], world: World, path: tuple[str, ...]) -> None:
    try:
        check(world)
    except Exception as error:
        raise AssertionError("\n  ".join([f"{error!r} after", *path])) from error
