"""What the controller knows: how often drafts are kept, and what steps cost. Plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from mtp.depth.shape import Shape

MEMORY_WINDOWS = 48
"""Time constant of the acceptance estimate: noise of about 1/sqrt(96), and a change is seen in some 50 windows."""

FADED_WINDOWS = 4
"""How much an old acceptance counts when it is looked at again: as much as one probe."""

FIRST_ACCEPTANCE = 0.75
"""Of a first draft, before any was seen: a little below what published runs of Qwen3.5 heads show."""

NEXT_ACCEPTANCE = 0.95
"""Of a position never seen, over that of the position before it."""

PRIOR_WINDOWS = 2.0
"""How many windows those two count as."""


class AcceptanceEstimate:
    """The chance that draft i+1 of a window is kept once draft i was, by exponentially forgetting counts."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._seen: list[float] = []

    def observe(self, drafts: Iterable[tuple[int, bool]]) -> None:
        """Drafts that followed each other: number in their chain, from 1, and whether it was right. Those after the
        first wrong one say nothing."""
        forget = 1 - 1 / MEMORY_WINDOWS
        for number, right in drafts:
            missing = number - len(self._seen)
            self._kept.extend([0.0] * missing)
            self._seen.extend([0.0] * missing)
            self._kept[number - 1] = self._kept[number - 1] * forget + right
            self._seen[number - 1] = self._seen[number - 1] * forget + 1
            if not right:
                return

    def by_position(self, depth: int, optimism: float = 0.0) -> list[float]:
        """The estimate for each of the first `depth` drafts, given that those before it were kept.

        `optimism` is how many standard errors to add: more where less was seen.
        """
        chances: list[float] = []
        for position in range(depth):
            prior = NEXT_ACCEPTANCE * chances[-1] if chances else FIRST_ACCEPTANCE
            kept, seen = 0.0, 0.0
            if position < len(self._seen):
                kept, seen = self._kept[position], self._seen[position]
            windows = seen + PRIOR_WINDOWS
            chance = (kept + PRIOR_WINDOWS * prior) / windows
            error = math.sqrt(chance * (1 - chance) / windows)
            chances.append(min(1.0, chance + optimism * error))
        return chances

    def fade(self, first: int) -> None:
        """Make room for news at position `first` (0 is the first draft) and after."""
        for position in range(first, len(self._seen)):
            share = min(1.0, FADED_WINDOWS / max(self._seen[position], 1.0))
            self._kept[position] *= share
            self._seen[position] *= share


def expected_kept(chances: Sequence[float]) -> float:
    """Mean tokens a window brings whose drafts are each kept with `chances`, given those before them."""
    total = reach = 1.0
    for chance in chances:
        reach *= chance
        total += reach
    return total


LIKELIEST_HOPE = 0.98
"""No chain of hopes is supposed to be longer than this lets it: fifty tokens."""


@dataclass(frozen=True)
class Run:
    """What a filled pipeline brings from one failed hope to the next: tokens, and windows that return."""

    tokens: float
    windows: float


def expected_run(chances: Sequence[float], width: int) -> Run:
    """Mean of a run whose drafts are each right with `chances`, given those before them; the last chance goes on.

    tokens = 1 + a_1 + a_1 a_2 + …      windows of w = 1 + a_1…a_w + a_1…a_2w + …
    """
    tokens = windows = reach = 1.0
    for number, chance in enumerate(chances, start=1):
        reach *= min(chance, LIKELIEST_HOPE)
        tokens += reach
        windows += reach if number % width == 0 else 0.0
    onward = min(chances[-1], LIKELIEST_HOPE)
    tokens += reach * onward / (1 - onward)
    behind = len(chances) % width
    following = reach * onward ** (width - behind)
    windows += following / (1 - onward**width)
    return Run(tokens, windows)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a lane's step: until its sequences have its tokens, and between its return and that of their window
    before it. `ahead`: it was sent before that returned; else the interval is what the slowest stage would allow."""

    seconds: float
    interval: float
    ahead: bool = False


FIRST_SAMPLES = 3
"""Steps timed before a width has a cost: their median survives one outlier, such as a kernel's first use."""

LEVEL_SAMPLES = 15
"""The level is the median of so many steps."""

SETTLED_SAMPLES = 16
"""After so many a cost stands until it is measured anew. The width in use sets the level, so nothing would
hold its cost in place: a hiccup now and then would push it up and up."""

LARGEST_SURPRISE = 0.25
"""A timing this far off, as a logarithm, counts as no further: hiccups of a shared machine."""


class StepCosts:
    """Cost of a step by shape, as a logarithm, over a level that all shapes share.

        log seconds = level + relative[shape] + noise

    The level follows whatever slows every step alike (other programs, heat, a longer context), so a shape that
    was timed in quiet and one timed under load can still be compared.
    """

    def __init__(self) -> None:
        self._relative: dict[Shape, float] = {}
        self._samples: dict[Shape, int] = {}
        self._fresh: dict[Shape, list[float]] = {}
        self._recent: deque[float] = deque(maxlen=LEVEL_SAMPLES)

    def start(self, shape: Shape) -> None:
        """Measure `shape`, for the first time or anew: its next FIRST_SAMPLES samples say what it costs."""
        self._fresh[shape] = []

    def measuring(self, shape: Shape) -> bool:
        """Whether a start has not come to its end yet."""
        return shape in self._fresh

    def measured(self, shape: Shape) -> bool:
        return shape in self._relative

    def observe(self, shape: Shape, seconds: float) -> None:
        """One step of `shape` took so long. A shape that was never started is ignored."""
        logarithm = math.log(max(seconds, 1e-9))
        if shape in self._fresh:
            self._fresh[shape].append(logarithm - self._level())
            if len(self._fresh[shape]) == FIRST_SAMPLES:
                self._renew(shape, self._fresh.pop(shape))
        elif shape in self._relative:
            if self._samples[shape] < SETTLED_SAMPLES:
                self._refine(shape, logarithm)
            self._recent.append(logarithm - self._relative[shape])

    def relative(self, shape: Shape) -> float:
        """Logarithm of the cost over the level.

        Of a shape not measured, the least it is supposed to be: of a block, that every further token costs at least
        half of what the last measured one did; of a filled pipeline, that drafts are free.
        """
        if shape in self._relative:
            return self._relative[shape]
        if shape.fill > 1:
            return self.relative(Shape(shape.width))
        blocks = (Shape(width) for width in range(1, shape.width))
        known = [math.exp(self._relative[s]) for s in blocks if s in self._relative]
        if len(known) < 2:
            return math.log(known[-1]) if known else 0.0
        return math.log(known[-1] + max(0.0, known[-1] - known[-2]) / 2)

    def _renew(self, shape: Shape, samples: list[float]) -> None:
        """Take the median of fresh samples, halfway to the old estimate where there is one."""
        if not self._relative:  # the first shape defines the level
            self._recent.extend(samples)
            self._relative[shape] = 0.0
        elif shape in self._relative:
            self._relative[shape] = (self._relative[shape] + median(samples)) / 2
        else:
            self._relative[shape] = median(samples)
        self._samples[shape] = FIRST_SAMPLES

    def _refine(self, shape: Shape, logarithm: float) -> None:
        """Improve a new estimate by one more sample."""
        surprise = logarithm - self._level() - self._relative[shape]
        surprise = max(-LARGEST_SURPRISE, min(LARGEST_SURPRISE, surprise))
        self._samples[shape] += 1
        self._relative[shape] += surprise / self._samples[shape]

    def _level(self) -> float:
        return median(self._recent) if self._recent else 0.0
