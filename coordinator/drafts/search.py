"""The search among shapes of windows: acceptance estimates, and the expected speed of each shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.drafts.step_costs import FIRST_SAMPLES, Shape, StepCost, StepCosts


class DraftResult(NamedTuple):
    """A draft at `position` in its chain, counted from 1, was `accepted` or rejected."""

    position: int
    accepted: bool


@dataclass
class DraftCounts:
    """`drafted[i]` drafts at position i + 1 have a result; `accepted[i]` of them were accepted."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Count drafts whose result is known."""
        for position, accepted in results:
            for counter in (self.drafted, self.accepted):
                counter.extend([0] * (position - len(counter)))
            self.drafted[position - 1] += 1
            self.accepted[position - 1] += accepted


@dataclass(frozen=True)
class ShapeReport:
    """One shape that the controller compares.

    `cost` is the time of a step relative to plain decoding, a lower bound unless `measured`. `tokens` are expected of a
    step or, in a filled pipeline, of a pass. `speed` is the expected speed relative to plain decoding.
    """

    width: int
    fill: int
    cost: float
    tokens: float
    speed: float
    measured: bool
    chosen: bool


@dataclass(frozen=True)
class SearchReport:
    """The comparison for up to `sequences` sequences that step together, each with up to `fill` windows in flight."""

    sequences: int
    fill: int
    shapes: tuple[ShapeReport, ...]
    """Plain decoding first, then blocks by depth, then filled pipelines."""
    plain_speed: float | None = None
    """Measured tokens per second of one answer without drafts under the present load; None before a measurement."""


MEMORY_WINDOWS = 48
"""Windows. Time constant of the acceptance estimate, whose noise is then 1/sqrt(96). It follows within about 50."""

FADED_WINDOWS = 4
"""Windows. Weight of an old acceptance estimate when a probe starts: as much as one probe."""

FIRST_ACCEPTANCE = 0.75
"""Acceptance of a first draft before any was seen: a little below published runs of Qwen3.5 heads."""

NEXT_ACCEPTANCE = 1.0
"""Acceptance of a position never seen, relative to the position before it."""

PRIOR_WINDOWS = 2.5
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

        `optimism` is a number of standard errors to add. The fewer drafts were seen, the more it adds. A position never
        seen is then assumed to be as good as the one before it.
        """
        chances: list[float] = []
        for position in range(depth):
            seen = position < len(self._drafted) and self._drafted[position] > 0
            if chances and optimism and not seen:
                chances.append(chances[-1])
                continue
            prior = NEXT_ACCEPTANCE * chances[-1] if chances else FIRST_ACCEPTANCE
            accepted, drafted = 0.0, 0.0
            if seen:
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


def expected_run(chances: Sequence[float], width: int) -> tuple[float, float]:
    """Return the mean tokens, and windows that return, of a filled pipeline between two misspeculations.

    Each draft is accepted with one of `chances`, given those before it.
    The windows after the first ones take their drafts from the end of the chain, so its last `width` positions repeat.

    tokens = 1 + a_1 + a_1 a_2 + …      windows of w = 1 + a_1…a_w + a_1…a_2w + …
    """
    bounded = [min(chance, MAX_CHANCE) for chance in chances]
    tokens = windows = reach = 1.0
    for number, chance in enumerate(bounded, start=1):
        reach *= chance
        tokens += reach
        windows += reach if number % width == 0 else 0.0
    newest = bounded[-width:]
    onward = math.prod(newest) ** (1 / len(newest))
    tokens += reach * onward / (1 - onward)
    behind = len(bounded) % width
    following = reach * onward ** (width - behind)
    windows += following / (1 - onward**width)
    return tokens, windows


SWITCH_GAIN = math.log(1.02)
"""Logarithm. Minimum gain for a change of shape, because estimates are not more precise than this."""

OPTIMISM = 0.6
"""Standard errors. Added to the acceptance of a shape when the search decides whether to probe it."""

OPTIMISTIC_ACCEPTANCE = 0.9
"""Acceptance assumed for a position out of use when the search decides about a later probe."""

COST_DOUBT = math.log(1.1)
"""Logarithm. A shape out of use is assumed to cost this much less than its estimate when a later probe is decided."""

PROBE_COST = 0.007
"""Share of time that probes of one shape may take at first. It halves with each probe that changes nothing."""

SHORT_INTERVAL, LONG_INTERVAL = 48, 96
"""Steps. Bounds of the first interval between probes of a shape. It doubles with each probe that changes nothing."""

LAST_INTERVAL = 320
"""Steps. Maximum interval between probes of one shape."""

LONGEST_PROBE = 12
"""Steps. Maximum length of a probe, for example if requests are too short to finish a measurement."""

LONGEST_DOUBT = 6
"""Steps. Maximum length of a probe whose cost is measured, while the acceptance is uncertain."""

STALE_STEPS = 128
"""Steps after a probe after which the acceptance at its positions counts little for the next one."""

EVALUATION_STEPS = 4
"""Steps between two comparisons of all shapes. One of 30 shapes takes about 0.2 ms."""


class Search:
    """The choice between `shapes` for steps of one number of sequences. Wider windows than `fused_width` cost more."""

    def __init__(
        self,
        acceptance: AcceptanceEstimate,
        shapes: Sequence[Shape],
        fused_width: int | None = None,
    ) -> None:
        self.acceptance = acceptance
        self.shapes = tuple(shapes)
        self.costs = StepCosts(fused_width)
        self.current = self.shapes[0]
        """The shape in use."""
        self._deepest = max(shape.depth for shape in self.shapes)
        self._deepest_block = max((s.depth for s in self.shapes if s.fill == 1), default=0)
        self._returned = 0
        self._step = 0
        self._probe: Shape | None = None
        self._last_probed: dict[Shape, int] = {}
        self._tries: dict[Shape, int] = {}  # probes since the last change of shape
        self._probe_began = 0
        self._matched: dict[tuple[AcceptanceEstimate, int], tuple[int, Shape | None]] = {}
        """The questions about matches of each class and number of sequences, and the choice for them."""
        self._start_probe(self.current)

    def start_from(self, other: Search) -> None:
        """Begin with the costs and the shape of `other`. The steps of that shape show the new level of all costs."""
        self.current = other.current
        if other.costs.is_measured(other.current):
            self.costs = other.costs.copy(other.current)
            self._last_probed = dict.fromkeys(other._last_probed, 0)
            self._probe = None
        else:
            self._start_probe(self.current)

    def record_step_cost(
        self, width: int, drafted: int, cost: StepCost, matched: Shape | None = None
    ) -> None:
        """Record the cost of a step of `width` tokens and `drafted` drafts. `matched` is the shape of a match."""
        if matched is not None:
            self.costs.record_cost(matched, cost)
            return
        fill = (drafted + 1) // width
        shape = Shape(width, fill)
        if fill and shape.depth == drafted:
            self.costs.record_cost(shape, cost)

    def choose_shape(self) -> Shape:
        """Return the shape of the next window."""
        shape = self._probe or self.current
        if shape.fill > 1:  # the search counts a pass through all stages as one step
            self._returned += 1
            if self._returned % shape.fill:
                return shape
        self._step += 1
        if self._probe is not None:
            if self._goes_on(self._probe):
                return self._probe
            self._probe = None
        elif self._step % EVALUATION_STEPS:
            return self.current
        self._switch_shape()
        candidate = self._worth_probing()
        if candidate is None:
            return self.current
        self._start_probe(candidate)
        return candidate

    def matched_shape(
        self, estimate: AcceptanceEstimate, shapes: Sequence[Shape], sequences: int
    ) -> Shape | None:
        """Return the best of `shapes` for a match with this acceptance, or None if the head or no draft is better.

        A choice holds for EVALUATION_STEPS questions of `sequences` that step together. There is none during a probe.
        """
        if self._probe not in (None, self.current):
            return None
        questions, shape = self._matched.get((estimate, sequences), (0, None))
        if questions % EVALUATION_STEPS == 0:
            again = questions % LAST_INTERVAL == 0
            shape = self._best_matched(estimate, shapes, sequences, again=again)
        self._matched[estimate, sequences] = questions + 1, shape
        return shape

    def _best_matched(
        self, estimate: AcceptanceEstimate, shapes: Sequence[Shape], sequences: int, *, again: bool
    ) -> Shape | None:
        """Return the best of `shapes` if it pays. With `again` a cost a little below its estimate is enough."""
        if not self.costs.is_measured(self.current):
            return None
        chances = estimate.by_position(max(shape.ahead for shape in shapes))
        best = max(shapes, key=lambda s: self._matched_value(s, chances, sequences))
        value = self._matched_value(best, chances, sequences) + (COST_DOUBT if again else 0.0)
        if value <= self._value(self.current) + SWITCH_GAIN:
            return None
        if again or not (self.costs.is_measured(best) or self.costs.is_measuring(best)):
            self.costs.start_measurement(best)
        return best

    def _matched_value(self, shape: Shape, chances: Sequence[float], sequences: int) -> float:
        """Return the logarithm of tokens per second of a sequence, on the scale of `_value`.

        The other sequences of the step yield what they yield without the match. No drafts follow a rejected window, so
        the step after it yields one token.
        """
        chances = chances[: shape.ahead]
        if shape.fill > 1:
            return self._run_value(shape, chances)
        usual = self._tokens(self.current) if self.current.fill == 1 else 1.0
        lost = (1 - math.prod(chances)) * (usual - 1)
        tokens = max(expected_accepted_length(chances) - lost, 1e-9)
        mean = (tokens + (sequences - 1) * usual) / sequences
        return math.log(mean) - self.costs.relative_cost(shape)

    def report(self) -> tuple[ShapeReport, ...]:
        """Return the state of plain decoding and of every shape that was measured."""
        first = self.shapes[0]
        base, base_cost = self._value(first), self.costs.relative_cost(first)
        return tuple(
            ShapeReport(
                shape.width,
                shape.fill,
                cost=math.exp(self.costs.relative_cost(shape) - base_cost),
                tokens=self._tokens(shape),
                speed=math.exp(self._value(shape) - base),
                measured=self.costs.is_measured(shape),
                chosen=shape == self.current,
            )
            for shape in self.shapes
            if shape in (first, self.current) or self.costs.is_measured(shape)
        )

    def _tokens(self, shape: Shape) -> float:
        """Return the expected tokens of a window or, in a filled pipeline, of a run."""
        chances = self.acceptance.by_position(shape.depth)
        if shape.fill == 1:
            return expected_accepted_length(chances)
        return expected_run(chances, shape.width)[0]

    def _value(self, shape: Shape, chances: Sequence[float] | None = None) -> float:
        """Return the logarithm of tokens per second, up to a constant."""
        if chances is None:
            chances = self.acceptance.by_position(shape.depth)
        chances = chances[: shape.depth]
        if shape.fill == 1:
            return math.log(expected_accepted_length(chances)) - self.costs.relative_cost(shape)
        return self._run_value(shape, chances)

    def _run_value(self, shape: Shape, chances: Sequence[float]) -> float:
        """Return the value of a filled pipeline: a run's tokens over a pass and an interval per further window."""
        cost = self.costs.relative_cost(shape)
        tokens, windows = expected_run(chances, shape.width)
        passes = 1 + (windows - 1) * self.costs.interval_share(shape)
        return math.log(tokens / passes) - cost

    def _goes_on(self, probe: Shape) -> bool:
        """Return whether more steps at the probed shape could show it to be the best."""
        steps = self._step - self._probe_began
        if self.costs.is_measuring(probe):
            return steps <= LONGEST_PROBE
        if probe == self.current or steps > LONGEST_DOUBT:
            return False
        goal = self._value(self.current) + SWITCH_GAIN
        return self._value(probe) <= goal < self._value(probe, self._optimistic_chances())

    def _optimistic_chances(self) -> list[float]:
        """Return the acceptance by position, with optimism for positions that the present shape does not use."""
        known = self.acceptance.by_position(self.current.depth)
        return known + self.acceptance.by_position(self._deepest, OPTIMISM)[len(known) :]

    def _switch_shape(self) -> None:
        """Change to the best measured shape if the gain is large enough."""
        chances = self.acceptance.by_position(self._deepest)
        measured = [shape for shape in self.shapes if self.costs.is_measured(shape)]
        best = max(measured, key=lambda s: self._value(s, chances), default=self.current)
        if self._value(best, chances) > self._value(self.current, chances) + SWITCH_GAIN:
            self.current = best
            self._tries.clear()

    def _worth_probing(self) -> Shape | None:
        """Return the best untried shape if it should win, or at the end of an interval one that could, or None."""
        goal = self._value(self.current) + SWITCH_GAIN
        likely = self.acceptance.by_position(self._deepest)
        untried = self._best_untried(likely)
        if untried is not None and self._value(untried, likely) > goal:
            return untried
        candidates = self._doubtful(goal)
        optimistic = self._optimistic_chances()
        untried = self._best_untried(optimistic)
        if untried is not None and self._value(untried, optimistic) > goal:
            candidates.append(untried)
        due = [s for s in candidates if self._step >= self._last_probed.get(s, 0) + self._wait(s)]
        probe = min(due, key=lambda s: self._last_probed.get(s, 0), default=None)
        if probe is not None:
            self._tries[probe] = self._tries.get(probe, 0) + 1
        return probe

    def _wait(self, shape: Shape) -> int:
        """Return the steps that pass between two probes of `shape`."""
        paid = round(self._probe_price(shape) / PROBE_COST)
        first = min(LONG_INTERVAL, max(SHORT_INTERVAL, paid))
        return min(LAST_INTERVAL, first << min(8, self._tries.get(shape, 0)))

    def _probe_price(self, probe: Shape) -> float:
        """Return the expected loss of a probe, in steps of the shape in use."""
        lost = 1 - math.exp(self._value(probe) - self._value(self.current))
        longer = math.exp(self.costs.relative_cost(probe) - self.costs.relative_cost(self.current))
        samples = 2 if self.costs.is_measured(probe) else FIRST_SAMPLES + 1
        return samples * longer * max(0.0, lost)

    def _best_untried(self, chances: Sequence[float]) -> Shape | None:
        """Return the best shape never probed, or None. Widths grow in steps, because the costs of rows are measured."""
        limit = 2 * self.costs.widest**2
        untried = [s for s in self.shapes if s not in self._last_probed and s.width <= limit]
        return max(untried, key=lambda s: self._value(s, chances), default=None)

    def _doubtful(self, goal: float) -> list[Shape]:
        """Return the shapes out of use that may have become better than `goal` since their last use."""
        known = self.acceptance.by_position(self._deepest)
        others = [shape for shape in self.shapes if shape != self.current]
        blocks = [s for s in others if s.fill == 1 and s.depth < self.current.depth]
        # Plain decoding is always included: only its known cost ensures that speculation never costs.
        shapes = [s for s in blocks if not s.depth or self._value(s, known) + COST_DOUBT > goal]
        filled = [s for s in others if s.fill > 1]
        best = max(filled, key=lambda s: self._value(s, known), default=None)
        if best is not None and self._value(best, known) + COST_DOUBT > goal:
            shapes.append(best)
        following = Shape(self.current.depth + 2)
        if self.current.fill == 1 and following.depth <= self._deepest_block:
            depth = self.current.depth
            hopeful = known[:depth] + [max(c, OPTIMISTIC_ACCEPTANCE) for c in known[depth:]]
            deeper = [s for s in others if s.fill == 1 and s.depth > depth]
            if self._value(following, hopeful) + COST_DOUBT > goal or any(
                self._value(s, hopeful) > goal for s in deeper
            ):  # the shallowest depth that shows whether drafts are accepted again
                shapes.append(following)
        return shapes

    def _start_probe(self, shape: Shape) -> None:
        stale = self._step - self._last_probed.get(shape, self._step) > STALE_STEPS
        if stale and shape.depth > self.current.depth:
            self.acceptance.fade(first=self.current.depth)
        self.costs.start_measurement(shape)
        self._probe, self._probe_began = shape, self._step
        self._last_probed[shape] = self._step
