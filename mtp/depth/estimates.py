"""Estimates of the controller: how often drafts are accepted, and the cost of steps. Plain numbers in and out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from mtp.depth.draft_result import DraftResult
from mtp.depth.shape import Shape

MEMORY_WINDOWS = 48
"""Windows. Time constant of the acceptance estimate.

Its noise is about 1/sqrt(96), and it follows a change within about 50 windows.
"""

FADED_WINDOWS = 4
"""Windows. Weight of an old acceptance estimate when a probe starts: as much as one probe."""

FIRST_ACCEPTANCE = 0.75
"""Acceptance of a first draft before any was seen: a little below published runs of Qwen3.5 heads."""

NEXT_ACCEPTANCE = 0.95
"""Acceptance of a position never seen, relative to the position before it."""

PRIOR_WINDOWS = 2.0
"""Windows. Weight of FIRST_ACCEPTANCE and NEXT_ACCEPTANCE in the estimate."""


class AcceptanceEstimate:
    """The chance that draft i+1 of a window is accepted if draft i was. Old counts decay exponentially."""

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._drafted: list[float] = []

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Record the results of drafts that followed each other. Results after the first rejected draft are ignored."""
        decay = 1 - 1 / MEMORY_WINDOWS
        for position, accepted in results:
            missing = position - len(self._drafted)
            self._accepted.extend([0.0] * missing)
            self._drafted.extend([0.0] * missing)
            self._accepted[position - 1] = self._accepted[position - 1] * decay + accepted
            self._drafted[position - 1] = self._drafted[position - 1] * decay + 1
            if not accepted:
                return

    def by_position(self, depth: int, optimism: float = 0.0) -> list[float]:
        """Return the estimate for each of the first `depth` drafts, given that the drafts before it were accepted.

        `optimism` is a number of standard errors to add. The fewer drafts were seen, the more it adds.
        """
        chances: list[float] = []
        for position in range(depth):
            prior = NEXT_ACCEPTANCE * chances[-1] if chances else FIRST_ACCEPTANCE
            accepted, drafted = 0.0, 0.0
            if position < len(self._drafted):
                accepted, drafted = self._accepted[position], self._drafted[position]
            windows = drafted + PRIOR_WINDOWS
            chance = (accepted + PRIOR_WINDOWS * prior) / windows
            error = math.sqrt(chance * (1 - chance) / windows)
            chances.append(min(1.0, chance + optimism * error))
        return chances

    def fade(self, first: int) -> None:
        """Reduce the weight of old counts at index `first` (0 is the first draft) and after it."""
        for position in range(first, len(self._drafted)):
            share = min(1.0, FADED_WINDOWS / max(self._drafted[position], 1.0))
            self._accepted[position] *= share
            self._drafted[position] *= share


def expected_accepted_length(chances: Sequence[float]) -> float:
    """Return the mean tokens of a window whose drafts are accepted with `chances`, given those before them."""
    total = reach = 1.0
    for chance in chances:
        reach *= chance
        total += reach
    return total


MAX_CHANCE = 0.98
"""Upper bound of an acceptance in `expected_run`: it bounds the mean run at fifty tokens."""


@dataclass(frozen=True)
class Run:
    """The mean yield of a filled pipeline between two misspeculations: tokens, and windows that return."""

    tokens: float
    windows: float


def expected_run(chances: Sequence[float], width: int) -> Run:
    """Return the mean run whose drafts are accepted with `chances`, given those before them.

    The last chance also applies to all later drafts.

    tokens = 1 + a_1 + a_1 a_2 + …      windows of w = 1 + a_1…a_w + a_1…a_2w + …
    """
    tokens = windows = reach = 1.0
    for number, chance in enumerate(chances, start=1):
        reach *= min(chance, MAX_CHANCE)
        tokens += reach
        windows += reach if number % width == 0 else 0.0
    onward = min(chances[-1], MAX_CHANCE)
    tokens += reach * onward / (1 - onward)
    behind = len(chances) % width
    following = reach * onward ** (width - behind)
    windows += following / (1 - onward**width)
    return Run(tokens, windows)


@dataclass(frozen=True)
class StepCost:
    """The cost of a micro-batch step, in seconds.

    `seconds` pass until its sequences have its tokens. `interval` passes between the return of two successive windows
    of a sequence. For a `speculative` window, sent before the window before it returned, the interval was measured.
    Otherwise it is the interval that the slowest stage would allow.
    """

    seconds: float
    interval: float
    speculative: bool = False


FIRST_SAMPLES = 3
"""Samples before a shape has a cost. Their median survives one outlier, such as the first use of a kernel."""

LEVEL_SAMPLES = 15
"""Samples. The level is the median of this many steps."""

SETTLED_SAMPLES = 16
"""Samples after which a cost is fixed until the shape is measured again.

The shape in use defines the level, so nothing else would limit its cost: occasional hiccups would raise it without
limit. A probe of another shape compares both again, because it is measured over the level that the shape in use has
then.
"""

LARGEST_SURPRISE = 0.25
"""Logarithm. Bound on the deviation of one sample, against hiccups of a shared machine."""


class StepCosts:
    """The cost of a step by shape, as a logarithm, over a level that all shapes share.

        log seconds = level + relative[shape] + noise

    The level follows everything that slows all steps equally: other programs, heat, a longer context. So a shape that
    was timed on an idle machine and one that was timed under load can be compared.
    """

    def __init__(self) -> None:
        self._relative: dict[Shape, float] = {}
        self._samples: dict[Shape, int] = {}
        self._fresh: dict[Shape, list[float]] = {}
        self._recent: deque[float] = deque(maxlen=LEVEL_SAMPLES)

    def start_measurement(self, shape: Shape) -> None:
        """Measure `shape` for the first time or again: its next FIRST_SAMPLES samples decide its cost."""
        self._fresh[shape] = []

    def is_measuring(self, shape: Shape) -> bool:
        """Return whether a measurement of `shape` is unfinished."""
        return shape in self._fresh

    def is_measured(self, shape: Shape) -> bool:
        """Return whether a measurement of `shape` is finished."""
        return shape in self._relative

    def record_step(self, shape: Shape, seconds: float) -> None:
        """Record the time of one step of `shape`. A shape whose measurement was never started is ignored."""
        logarithm = math.log(max(seconds, 1e-9))
        if shape in self._fresh:
            self._fresh[shape].append(logarithm - self._level())
            if len(self._fresh[shape]) == FIRST_SAMPLES:
                self._replace_cost(shape, self._fresh.pop(shape))
        elif shape in self._relative:
            if self._samples[shape] < SETTLED_SAMPLES:
                self._refine_cost(shape, logarithm)
            self._recent.append(logarithm - self._relative[shape])

    def relative_cost(self, shape: Shape) -> float:
        """Return the logarithm of the cost of `shape` over the level.

        For a shape that is not measured, return a lower bound. In a block, each further token costs at least half of
        what the last measured one did. In a filled pipeline, drafts are free.
        """
        if shape in self._relative:
            return self._relative[shape]
        if shape.fill > 1:
            return self.relative_cost(Shape(shape.width))
        blocks = (Shape(width) for width in range(1, shape.width))
        known = [math.exp(self._relative[s]) for s in blocks if s in self._relative]
        if len(known) < 2:
            return math.log(known[-1]) if known else 0.0
        return math.log(known[-1] + max(0.0, known[-1] - known[-2]) / 2)

    def step_seconds(self, shape: Shape) -> float | None:
        """Return the present time of one step of a measured `shape`, or None."""
        if shape not in self._relative or not self._recent:
            return None
        return math.exp(self._level() + self._relative[shape])

    def _replace_cost(self, shape: Shape, samples: list[float]) -> None:
        """Set the cost to the median of fresh samples. An old estimate, perhaps of a colder chip, does not count."""
        if not self._relative:  # the first shape defines the level
            self._recent.extend(samples)
            self._relative[shape] = 0.0
        else:
            self._relative[shape] = median(samples)
        self._samples[shape] = FIRST_SAMPLES

    def _refine_cost(self, shape: Shape, logarithm: float) -> None:
        """Improve a new estimate by one more sample."""
        surprise = logarithm - self._level() - self._relative[shape]
        surprise = max(-LARGEST_SURPRISE, min(LARGEST_SURPRISE, surprise))
        self._samples[shape] += 1
        self._relative[shape] += surprise / self._samples[shape]

    def _level(self) -> float:
        return median(self._recent) if self._recent else 0.0
