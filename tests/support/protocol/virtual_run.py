"""The real scheduler and controller over machines of recorded costs, in virtual time.

There are no threads, tensors or event loops, so a run of 400 frames takes some tenths of a second.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.drafts.controller import Controller
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import Finished, GenerationRequest
from coordinator.schedule.scheduler import Scheduler
from proto.frame import Frame, Outcome, Segment
from proto.params import SamplingParams
from tests.support.protocol.recorded_costs import Costs

WORDS = 97
PROMPT = tuple(range(16))
ROOM = Capacity(sequences=64, kv_tokens=2**22, prefix_bytes=0)


@dataclass(frozen=True)
class Load:
    """Clients that ask one request of `tokens` tokens after another, until `total` tokens have come."""

    streams: Callable[[float], int]
    """The number of clients by the share of `total` that has come."""
    tokens: int
    total: int
    chances: Callable[[int], Sequence[float]]
    """The acceptance of each draft of a chain, by its place in the text."""
    context: int = 0
    """Tokens before the prompt."""
    growth: int = 1
    """Tokens by which the context grows with each token, so that few tokens reach a long context."""
    gap: float | None = None
    """Seconds between two clients, if they ask together again when the answers of all have ended."""


@dataclass(frozen=True)
class Noise:
    """The errors of the scheduler's clock, which are no part of the speed.

    Times scatter by `scatter`, and a share `outliers` of frames takes ten times as long. The first frame of a number
    of rows and drafts takes `compiling` seconds longer.
    """

    scatter: float = 0.0
    outliers: float = 0.0
    compiling: float = 0.0


@dataclass
class Texts:
    """The texts of all sequences, and the drafts of a head."""

    load: Load
    seed: int
    seeds: dict[int, int] = field(default_factory=dict)
    """The number of each sequence's text."""
    _next: dict[int, int] = field(default_factory=dict)
    _luck: dict[int, list[float]] = field(default_factory=dict)

    def decide(self, segment: Segment) -> Outcome:
        """Return the last stage's decision about a segment. A window must begin where the one before was accepted."""
        where, sequence = (segment.seq_id, segment.window), segment.seq_id
        if not segment.open and not segment.sample:
            return Outcome(*where, segment.width)
        count = segment.width
        if segment.open:
            start = segment.position
            right = start == self._next.get(sequence)
            if not right or not (segment.continues or segment.tokens[0] == self._token(sequence, start)):
                return Outcome(*where, 0, cancelled=True)
            count = 1
            while count < segment.width and segment.tokens[count] == self._token(sequence, start + count):
                count += 1
        at = self._next[sequence] = segment.position + count
        return Outcome(*where, count, self._token(sequence, at), self._drafts(sequence, at, segment.drafts))

    def _drafts(self, sequence: int, at: int, count: int) -> tuple[int, ...]:
        chances, luck, right = self.load.chances(at), self._lucks(sequence), True
        drafts = list[int]()
        for number in range(count):
            place = at + 1 + number
            right = right and luck[place] < chances[min(number, len(chances) - 1)]
            drafts.append((self._token(sequence, place) + (not right)) % WORDS)
        return tuple(drafts)

    def _token(self, sequence: int, place: int) -> int:
        return (place * 7 + self.seeds[sequence]) % WORDS

    def _lucks(self, sequence: int) -> list[float]:
        number = self.seeds[sequence]
        if number not in self._luck:
            drawn = random.Random(1000 * self.seed + number)
            self._luck[number] = [drawn.random() for _ in range(len(PROMPT) + self.load.tokens + 32)]
        return self._luck[number]


class Machines:
    """The stages of `costs`. Frames follow each other through them."""

    def __init__(self, costs: Costs, texts: Texts, noise: Noise, seed: int) -> None:
        self.costs, self.texts, self.noise = costs, texts, noise
        self.frames: deque[tuple[float, float, Frame]] = deque()
        """The time at which each frame returns, how much later the scheduler's clock shows it, and the frame."""
        self._drawn = random.Random(seed)
        self._free = [0.0] * costs.stages
        self._done: dict[int, float] = {}
        self._compiled: set[tuple[int, int, int]] = set()

    def send(self, frame: Frame, now: float) -> None:
        """Let the stages compute `frame`."""
        costs, load = self.costs, self.texts.load
        outcomes = tuple(self.texts.decide(segment) for segment in frame.segments)
        skipped = all(outcome.cancelled for outcome in outcomes)
        windows = [(s.width, load.context + load.growth * s.position) for s in frame.segments if s.open]
        prompt = sum(s.width for s in frame.segments if not s.open)
        drafts = max((s.drafts for s in frame.segments), default=0)
        noise, compiling = self._draw_noise(windows, drafts)
        moment, late, times = now + costs.host / 2000, 0.0, list[float]()
        if costs.stages > 1:  # the last stage relays the tokens
            relayed = [self._done[s.seq_id] for s in frame.segments if s.continues]
            moment = max([moment, *(done + costs.hop / 1000 for done in relayed)])
        for stage in range(costs.stages):
            last = stage == costs.stages - 1
            took = costs.milliseconds(windows, drafts, prompt, last=last) / 1000
            if not stage and not any(s.continues for s in frame.segments):
                took += costs.built * max(0, len(frame.segments) - 1) / 1000
            if not frame.segments or (skipped and last):
                took, compiling = 1e-5, 0.0
            self._free[stage] = moment = max(moment, self._free[stage]) + took
            longer = took * (noise - 1) + (compiling if last else 0.0)
            late += longer
            times.append(took + longer)
            moment += 0.0 if last else costs.hop / 1000
        self._done |= {segment.seq_id: moment for segment in frame.segments}
        stage_us = tuple(round(seconds * 1e6) for seconds in times)
        done = replace(frame, outcomes=outcomes, stage_us=stage_us)
        self.frames.append((moment + costs.host / 2000, late, done))

    def _draw_noise(self, windows: Sequence[tuple[int, int]], drafts: int) -> tuple[float, float]:
        """Return a factor of the times of a frame, and the seconds of compiling."""
        factor = math.exp(self._drawn.gauss(0, self.noise.scatter))
        factor *= 10 if self._drawn.random() < self.noise.outliers else 1
        shape = len(windows), sum(width for width, _ in windows), drafts
        first = bool(windows) and shape not in self._compiled
        self._compiled.add(shape)
        return factor, self.noise.compiling if first else 0.0


@dataclass
class Run:
    """The tokens and seconds of a run, and of its first half. `steps` has sequences, rows and drafts of each frame."""

    tokens: int = 0
    seconds: float = 0.0
    half: tuple[int, float] = (0, 0.0)
    steps: list[tuple[int, int, int]] = field(default_factory=list)

    def speed(self, *, later: bool = False) -> float:
        """Return the tokens per second, `later` of the second half only."""
        tokens, seconds = self.half if later else (0, 0.0)
        return (self.tokens - tokens) / (self.seconds - seconds)


def run(controller: Controller, costs: Costs, load: Load, noise: Noise, seed: int = 0) -> Run:
    """Serve `load` by machines of `costs`. A controller that served before forgets their costs, as with a new plan."""
    texts = Texts(load, seed)
    machines = Machines(costs, texts, noise, seed)
    scheduler = Scheduler(Limits(context=2**20), controller)
    scheduler.reset(costs.stages, 0, ROOM, 0.0)
    now, late, asked, busy, found = 0.0, 0.0, 0, 0, Run()
    waiting = deque[float]()
    while found.tokens < load.total:
        clients = load.streams(found.tokens / load.total)
        if load.gap is None:
            waiting.extend([now] * (clients - busy))
        elif not busy and not waiting:
            waiting.extend(now + number * load.gap for number in range(clients))
        if waiting and not machines.frames and not busy:
            now = max(now, waiting[0])
        while waiting and waiting[0] <= now:
            waiting.popleft()
            request = GenerationRequest(PROMPT, load.tokens, SamplingParams(seed=asked))
            texts.seeds[scheduler.submit(request, now + late).seq_id] = asked
            asked, busy = asked + 1, busy + 1
        while (frame := scheduler.next_frame(now + late)) is not None:
            machines.send(frame, now)
        now, longer, done = machines.frames.popleft()
        late += longer
        outcome = scheduler.apply_outcomes(done, now + late)
        busy -= sum(isinstance(event, Finished) for _, event in outcome.events)
        found.tokens += outcome.token_count
        found.seconds = now
        if not found.half[0] and 2 * found.tokens >= load.total:
            found.half = found.tokens, now
        if done.segments and done.segments[0].open:
            rows, drafts = sum(s.width for s in done.segments), max(s.drafts for s in done.segments)
            found.steps.append((len(done.segments), rows, drafts))
    return found
