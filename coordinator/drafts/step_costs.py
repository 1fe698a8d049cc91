"""The measured costs of steps by shape, and the costs that follow from them for other shapes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median


@dataclass(frozen=True)
class Shape:
    """Windows of `width` tokens, up to `fill` of them in flight.

    With `fill` 1 a window takes all drafts (a block). With `fill` > 1 the pipeline is filled: all windows but the
    first are speculative. With `matched` the drafts come from the text, and none are requested.
    """

    width: int = 1
    fill: int = 1
    matched: bool = False

    @property
    def ahead(self) -> int:
        """Drafts of a chain: enough for the newest window in flight when the oldest one is accepted whole."""
        return self.width * self.fill - 1

    @property
    def depth(self) -> int:
        """Drafts to request with a window."""
        return 0 if self.matched else self.ahead


@dataclass(frozen=True)
class StepCost:
    """The cost of a micro-batch step, in seconds.

    `seconds` pass until its sequences have its tokens. `interval` passes between the return of two successive windows
    of a sequence. For a `speculative` window, sent before the window before it returned, the interval was measured.
    Otherwise it is the interval that the slowest stage would allow. `stages` are the stages' own times.
    """

    seconds: float
    interval: float
    speculative: bool = False
    stages: tuple[float, ...] = ()


FIRST_SAMPLES = 2
"""Samples before a shape has a cost, if they differ by less than CONFIRMED."""

DOUBTED_SAMPLES = 3
"""Samples before a shape has a cost otherwise. Their median survives one outlier, such as the first use of a kernel."""

LEVEL_SAMPLES = 15
"""Samples. The level is the median of this many steps."""

SETTLED_SAMPLES = 16
"""Samples after which a cost is fixed until the shape is measured again.

The shape in use defines the level, so nothing else would limit its cost, and hiccups would raise it.
"""

LARGEST_SURPRISE = 0.25
"""Logarithm. Bound on the deviation of one sample, against hiccups of a shared machine."""

CONFIRMED = math.log(1.08)
"""Logarithm. Samples this close to each other, or to the earlier cost, end a measurement. Steps scatter by 5 %."""

UNFUSED = math.log(1.1)
"""Logarithm. A guess for windows that MLX's fused attention does not take, until one of them is measured."""

SHARE_STEPS = 24
"""Steps. Time constant of the averages of a shape's uneven intervals and its stage times, relative to its cost."""


class StepCosts:
    """The cost of a step by shape, as a logarithm, over a level that all shapes share.

        log seconds = level + relative[shape] + noise

    The level follows everything that slows all steps equally: other programs, heat, a longer context. So a shape that
    was timed on an idle machine and one that was timed under load can be compared.
    """

    def __init__(self, fused_width: int | None = None) -> None:
        self._fused_width = fused_width
        self._relative: dict[Shape, float] = {}
        self._samples: dict[Shape, int] = {}
        self._fresh: dict[Shape, list[float]] = {}
        self._recent: deque[float] = deque(maxlen=LEVEL_SAMPLES)
        self._shares: dict[Shape, _Shares] = {}

    def copy(self, settled: Shape) -> StepCosts:
        """Return independent costs. Samples of `settled` move the level; those of other shapes refine their costs."""
        copied = StepCosts(self._fused_width)
        copied._relative = dict(self._relative)
        copied._samples = dict.fromkeys(self._samples, FIRST_SAMPLES) | {settled: SETTLED_SAMPLES}
        copied._recent = self._recent.copy()
        copied._shares = {shape: replace(shares) for shape, shares in self._shares.items()}
        return copied

    @property
    def widest(self) -> int:
        """Width of the widest measured windows."""
        return max((shape.width for shape in self._relative), default=1)

    def start_measurement(self, shape: Shape) -> None:
        """Let the next samples of `shape` decide its cost. One is enough if it confirms the earlier cost."""
        self._fresh[shape] = []

    def is_measuring(self, shape: Shape) -> bool:
        """Return whether a measurement of `shape` is unfinished."""
        return shape in self._fresh

    def is_measured(self, shape: Shape) -> bool:
        """Return whether a measurement of `shape` is finished."""
        return shape in self._relative

    def record_cost(self, shape: Shape, cost: StepCost) -> None:
        """Record the cost of one step of `shape`. A shape whose measurement was never started is ignored."""
        self._shares.setdefault(shape, _Shares()).record_cost(cost)
        self.record_step(shape, cost.seconds)

    def record_step(self, shape: Shape, seconds: float) -> None:
        """Record the time of one step of `shape`. A shape whose measurement was never started is ignored."""
        logarithm = math.log(max(seconds, 1e-9))
        if shape in self._fresh:
            self._record_fresh(shape, logarithm - self._level())
        elif shape in self._relative:
            if self._samples[shape] < SETTLED_SAMPLES:  # the estimate is new
                surprise = logarithm - self._level() - self._relative[shape]
                surprise = max(-LARGEST_SURPRISE, min(LARGEST_SURPRISE, surprise))
                self._samples[shape] += 1
                self._relative[shape] += surprise / self._samples[shape]
            self._recent.append(logarithm - self._relative[shape])

    def relative_cost(self, shape: Shape) -> float:
        """Return the logarithm of the cost of `shape` over the level.

        That of an unmeasured shape follows from the measured widths around its own, and from the cost of a draft. The
        first windows that leave a fused kernel are expected to cost a tenth more.
        """
        if shape in self._relative:
            return self._relative[shape]
        if not self._relative:
            return 0.0
        cost = math.log(self._rows_cost(shape.width) + self._draft_cost() * shape.depth)
        fused = self._fused_width or math.inf
        return cost + (UNFUSED if shape.width > fused >= self.widest else 0.0)

    def interval_share(self, shape: Shape) -> float:
        """Return the interval between two windows of a filled pipeline of `shape`, relative to its cost."""
        expected = self._slowest_stage(shape) / math.exp(self.relative_cost(shape))
        expected = max(1 / shape.fill, expected)
        shares = self._shares.get(shape)
        if shares is None or not shares.intervals:
            return expected
        weight = min(1.0, shares.intervals / SHARE_STEPS)
        return expected + weight * (shares.interval - expected)

    def step_seconds(self, shape: Shape) -> float | None:
        """Return the present time of one step of a measured `shape`, or None."""
        if shape not in self._relative or not self._recent:
            return None
        return math.exp(self._level() + self._relative[shape])

    def _rows_cost(self, width: int) -> float:
        """Return the cost of windows of `width` tokens without drafts, over the level."""
        draft = self._draft_cost()
        known: dict[int, float] = {}
        for shape, logarithm in self._relative.items():
            cost = max(math.exp(logarithm) - draft * shape.depth, 1e-9)
            known[shape.width] = min(cost, known.get(shape.width, cost))
        return _cost_at(width, known)

    def _draft_cost(self) -> float:
        """Return the cost of one draft over the level: 0 until two shapes show it.

        A further row takes about the same time on every stage, and a draft only on the last one. So drafts took what
        the last stage gained over the others. A single stage shows rows and drafts together, as rows, unless rows are
        known from windows that request no draft.
        """
        known = self._stage_costs()
        if not known:
            return self._draft_cost_over_rows()
        first, last = min(known, key=lambda s: s.depth), max(known, key=lambda s: s.depth)
        if first.depth == last.depth:
            return 0.0
        before, after = known[first], known[last]
        gained = (after.last - before.last) - (after.others - before.others)
        return max(0.0, gained / (last.depth - first.depth))

    def _draft_cost_over_rows(self) -> float:
        """Return what a draft adds to windows without drafts, at the widest window with drafts; 0 if unknown."""
        plain = {s.width: math.exp(c) for s, c in self._relative.items() if not s.depth}
        drafted = [s for s in self._relative if s.depth and s.fill == 1]
        if len(plain) < 2 or not drafted:
            return 0.0
        widest = max(drafted, key=lambda s: s.width)
        cost = math.exp(self._relative[widest]) - _cost_at(widest.width, plain)
        return max(0.0, cost / widest.depth)

    def _slowest_stage(self, shape: Shape) -> float:
        """Return the cost of the slowest stage at `shape` over the level, from the nearest measured shape."""
        known = self._stage_costs()
        if not known:
            return 0.0
        near = min(known, key=lambda s: (abs(s.width - shape.width), abs(s.depth - shape.depth)))
        stages = known[near]
        rows = (self._rows_cost(shape.width) - self._rows_cost(near.width)) / stages.stages
        drafts = self._draft_cost() * (shape.depth - near.depth)
        return max(stages.others + rows, stages.last + rows + drafts)

    def _stage_costs(self) -> dict[Shape, _Shares]:
        """Return the costs of the stages over the level, for the measured shapes of several stages."""
        found = {}
        for shape, relative in self._relative.items():
            shares, cost = self._shares.get(shape, _Shares()), math.exp(relative)
            if shares.stages:
                found[shape] = replace(shares, others=shares.others * cost, last=shares.last * cost)
        return found

    def _record_fresh(self, shape: Shape, relative: float) -> None:
        samples = self._fresh[shape]
        samples.append(relative)
        known = self._relative.get(shape)
        if known is not None and len(samples) == 1 and abs(relative - known) < CONFIRMED:
            del self._fresh[shape]
            self._relative[shape] = (known + relative) / 2
        elif len(samples) == DOUBTED_SAMPLES or (
            len(samples) == FIRST_SAMPLES and abs(samples[1] - samples[0]) < CONFIRMED
        ):
            del self._fresh[shape]
            if not self._relative:  # the first shape defines the level
                self._recent.extend(samples)
            # An old estimate, perhaps of a colder chip, does not count.
            self._relative[shape] = median(samples) if self._relative else 0.0
            self._samples[shape] = FIRST_SAMPLES

    def _level(self) -> float:
        return median(self._recent) if self._recent else 0.0


@dataclass
class _Shares:
    """Times of one shape relative to its cost, as moving averages.

    `others` is the slowest of all `stages` but the last. `stages` is 0, or 2 and more. `interval` is that between two
    windows of a filled pipeline, from `intervals` samples.
    """

    stages: int = 0
    others: float = 0.0
    last: float = 0.0
    interval: float = 0.0
    intervals: int = 0

    def record_cost(self, cost: StepCost) -> None:
        """Record one step."""
        seconds = max(cost.seconds, 1e-9)
        if cost.speculative:
            self.intervals += 1
            self.interval = _average(self.interval, cost.interval / seconds, self.intervals)
        if len(cost.stages) > 1:
            samples = SHARE_STEPS if self.stages else 1
            self.stages = len(cost.stages)
            self.others = _average(self.others, max(cost.stages[:-1]) / seconds, samples)
            self.last = _average(self.last, cost.stages[-1] / seconds, samples)


def _cost_at(width: int, known: Mapping[int, float]) -> float:
    """Return the cost of `width` tokens from the `known` widths around it, or with half of the last slope."""
    if width in known:
        return known[width]
    below = [w for w in sorted(known) if w < width]
    above = [w for w in sorted(known) if w > width]
    if not below:
        return known[above[0]]
    last = below[-1]
    if above:
        slope = (known[above[0]] - known[last]) / (above[0] - last)
    elif len(below) > 1:
        slope = max(0.0, known[last] - known[below[-2]]) / (last - below[-2]) / 2
    else:
        slope = 0.0
    return known[last] + slope * (width - last)


def _average(before: float, sample: float, samples: int) -> float:
    """Return the average of `samples` samples, or a moving average of SHARE_STEPS of them."""
    return before + (sample - before) / min(samples, SHARE_STEPS)
