"""The depth controller: it chooses the depth with the most tokens per second, from step costs and acceptance.

    tokens per second at depth k  ~  (1 + a_1 + a_1 a_2 + … + a_1…a_k) / cost(k + 1).

Here cost(w) is the time of a step of width w. a_i is the chance that draft i is accepted if the drafts before it were.
Plain decoding, depth 0, always competes.

A depth that is not in use shows neither its cost nor (beyond the depth in use) its acceptance. The controller therefore
*probes* it: it uses the depth for a few steps, and for more while the depth could still turn out best. At the start it
probes depths from 0 upwards, as long as the next one could win according to the estimates. Later it probes plain
decoding, shallower depths whose value is close, and the next deeper one if it could win. These probes take turns, at
intervals that double while no probe changes the choice.

Simulations with expensive and cheap verification use five acceptance profiles (tests/unit/mtp/test_controller.py).
Against the best fixed depth, exploration costs 1.5 % over 1,000 tokens from a cold start and 0.8 % over 4,000.

The controller reads no clock and draws no random number. Only recorded results and costs decide. Tokens do not depend
on the depth (DESIGN §1), so a wrong choice costs only time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mtp.depth.draft_result import DraftResult
from mtp.depth.estimates import (
    FIRST_SAMPLES,
    AcceptanceEstimate,
    StepCost,
    StepCosts,
    expected_accepted_length,
    expected_run,
)
from mtp.depth.report import SearchReport, ShapeReport
from mtp.depth.shape import Shape
from proto.errors import UsageError

MAX_DEPTH = 8
"""Drafts. Maximum depth of `--mtp`. At an acceptance of .7 a draft, a ninth draft is accepted in 4 of 100 windows."""

AUTO_DEPTH = 4
"""Drafts. Maximum depth that `auto` considers."""


@dataclass(frozen=True)
class MtpMode:
    """The value of `--mtp`: a fixed `depth` (0 for `off`), `filled`, or neither for `auto`."""

    depth: int | None = None
    filled: bool = False

    @classmethod
    def parse(cls, text: str) -> MtpMode:
        """Parse the value of `--mtp`.

        Raises UsageError for anything but `auto`, `off`, `filled` or a depth up to MAX_DEPTH.
        """
        word = text.strip().lower()
        if word == "filled":
            return cls(filled=True)
        if word in ("auto", "off"):
            return cls(None if word == "auto" else 0)
        if word.isascii() and word.isdigit() and int(word) <= MAX_DEPTH:
            return cls(int(word))
        raise UsageError(
            f"--mtp {text!r}: write auto, off, filled, or a number of drafts, 1 to {MAX_DEPTH}"
        )

    def __str__(self) -> str:
        if self.depth is None:
            return "filled" if self.filled else "auto"
        return str(self.depth) if self.depth else "off"


SWITCH_GAIN = math.log(1.02)
"""Logarithm. Minimum gain for a change of depth, because estimates are not more precise than this."""

OPTIMISM = 0.6
"""Standard errors. Added to the acceptance of a depth when the controller decides whether to probe it."""

OPTIMISTIC_ACCEPTANCE = 0.9
"""Acceptance assumed for a position out of use when the controller decides about a later probe."""

COST_DOUBT = math.log(1.1)
"""Logarithm. A depth out of use is assumed to cost this much less than its estimate when a later probe is decided."""

FILLED_WIDTHS = (1, 2)
"""Tokens. Widths of windows in a filled pipeline.

A wide window is not verified sooner there, so width pays only if a stage takes hardly longer for it.
"""

SHARE_STEPS = 8
"""Steps. Time constant of the average interval between windows, relative to a pass."""

FIRST_INTERVAL = 96
"""Steps. First interval between probes. It doubles while probes change nothing."""

LAST_INTERVAL = 512
"""Steps. Maximum interval between probes."""

LONGEST_PROBE = 4 * FIRST_SAMPLES
"""Steps. Maximum length of a probe, for example if requests are too short to finish a measurement."""


class Controller:
    """The choice of each step's shape, for any number of sequences that step together.

    One controller serves a whole process. All sequences share one acceptance estimate, because acceptance depends on
    the text. Costs are separate for 1, 2, 3-4, 5-8, … sequences a step.
    """

    def __init__(self, mode: MtpMode, max_depth: int = AUTO_DEPTH) -> None:
        self.mode = mode
        self.max_depth = max_depth
        self.acceptance = AcceptanceEstimate()
        self._searches: dict[tuple[int, int], _Search] = {}

    def choose_shape(self, sequences: int = 1, fill: int = 1) -> Shape:
        """Return the shape of the next window of `sequences` sequences that step together. Call it once a step.

        Each of the sequences may have up to `fill` windows in flight.
        """
        if self.mode.depth is not None:
            return Shape(self.mode.depth + 1)
        if self.mode.filled:
            return Shape(1, fill)
        return self._search(sequences, fill).choose_shape()

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Record the results of a window's drafts. Do not call it for invalidated windows."""
        self.acceptance.record_drafts(results)

    def record_step_cost(
        self, sequences: int, width: int, drafted: int, cost: StepCost, fill: int = 1
    ) -> None:
        """Record the cost of a step that verified windows of `width` tokens and drafted `drafted` tokens for each.

        Do not call it for steps with prompt tokens or with windows of different widths. A step between two shapes,
        which verified for one and drafted for the other, is ignored.
        """
        if self.mode.depth is None and not self.mode.filled:
            self._search(sequences, fill).record_step_cost(width, drafted, cost)

    def forget_costs(self) -> None:
        """Forget all costs, because other machines or other cuts serve from now on. Keep the acceptance."""
        self._searches.clear()

    def report(self) -> tuple[SearchReport, ...]:
        """Return the shapes that the controller compares, for status pages. It is empty for a fixed mode."""
        return tuple(
            SearchReport(2**bits, fill, search.report(), search.costs.step_seconds(Shape(1)))
            for (bits, fill), search in sorted(self._searches.items())
        )

    def _search(self, sequences: int, fill: int) -> _Search:
        key = ((sequences - 1).bit_length(), fill)
        if key not in self._searches:
            self._searches[key] = _Search(self.max_depth, self.acceptance, fill)
        return self._searches[key]


class _Search:
    """The search for the best shape at one number of sequences.

    It finds the best depth of a block. If the pipeline has room for `fill` windows of a sequence, it also decides
    whether a filled pipeline is better.
    """

    def __init__(self, max_depth: int, acceptance: AcceptanceEstimate, fill: int) -> None:
        self.max_depth = max_depth
        self.acceptance = acceptance
        self.costs = StepCosts()
        self.depth = 0
        self.filled: Shape | None = None
        """The shape of the filled pipeline in use, or None."""
        shapes = [Shape(width, fill) for width in FILLED_WIDTHS if fill > 1]
        self._fillings = [shape for shape in shapes if shape.depth <= MAX_DEPTH]
        self._shares: dict[bool, float] = {}
        """Interval between two windows of a sequence, relative to a pass.

        The value at False is the interval that the slowest stage allows; the one at True is measured.
        """
        self._returned = 0
        self._step = 0
        self._probe: int | None = None
        self._probe_ends = 0
        self._last_probed: dict[int, int] = {}
        self._interval = FIRST_INTERVAL
        self._next_probe = FIRST_INTERVAL
        self._start_probe(0)

    def record_step_cost(self, width: int, drafted: int, cost: StepCost) -> None:
        """Record the cost of a step. See Controller."""
        for shape in (Shape(width), *self._fillings):
            if (shape.width, shape.depth) == (width, drafted):
                self.costs.record_step(shape, cost.seconds)
        share = cost.interval / cost.seconds
        before = self._shares.setdefault(cost.speculative, share)
        self._shares[cost.speculative] = before + (share - before) / SHARE_STEPS

    def report(self) -> tuple[ShapeReport, ...]:
        """Return the state of every shape. See SearchReport."""
        chosen = self.filled or Shape(self.depth + 1)
        blocks = [Shape(depth + 1) for depth in range(self.max_depth + 1)]
        plain, plain_cost = self._value(0), self.costs.relative_cost(blocks[0])
        reports = []
        for shape in [*blocks, *self._fillings]:
            filled = shape.fill > 1
            value = self._value_filled(shape) if filled else self._value(shape.depth)
            chances = self.acceptance.by_position(shape.depth)
            tokens = (
                expected_run(chances, shape.width).tokens
                if filled
                else expected_accepted_length(chances)
            )
            reports.append(
                ShapeReport(
                    shape.width,
                    shape.fill,
                    cost=math.exp(self.costs.relative_cost(shape) - plain_cost),
                    tokens=tokens,
                    speed=math.exp(value - plain),
                    measured=self.costs.is_measured(shape),
                    chosen=shape == chosen,
                )
            )
        return tuple(reports)

    def choose_shape(self) -> Shape:
        """Return the shape of the next window."""
        if self.filled is not None and self._probe is None:
            self._returned += 1
            if self._returned % self.filled.fill:
                return self.filled  # the search below counts a pass through all stages as one step
        depth = self._choose_depth()
        if self._probe is not None or self.filled is None:
            return Shape(depth + 1)
        return self.filled

    def _choose_depth(self) -> int:
        self._step += 1
        if self._probe is not None:
            if self._step <= self._probe_ends and self._undecided(self._probe):
                return self._probe
            self._probe = None
        self._switch_depth()
        self._switch_filled()
        candidate = self._worth_probing()
        if candidate is None:
            return self.depth
        self._start_probe(candidate)
        return candidate

    def _value(self, depth: int, chances: list[float] | None = None) -> float:
        """Return the logarithm of tokens per second, up to a constant."""
        if chances is None:
            chances = self.acceptance.by_position(depth)
        return math.log(expected_accepted_length(chances[:depth])) - self.costs.relative_cost(
            Shape(depth + 1)
        )

    def _value_filled(self, shape: Shape) -> float:
        """Return the value of a filled pipeline over a run between two misspeculations.

        A pass goes by until the first window returns, and an interval for each further window.
        """
        run = expected_run(self.acceptance.by_position(shape.depth), shape.width)
        share = self._shares.get(True, self._shares.get(False, 1.0))
        interval = max(1 / shape.fill, share)
        passes = 1 + (run.windows - 1) * interval
        return math.log(run.tokens / passes) - self.costs.relative_cost(shape)

    @property
    def _present_value(self) -> float:
        """Value of the shape in use."""
        block = self._value(self.depth)
        return block if self.filled is None else max(block, self._value_filled(self.filled))

    def _switch_filled(self) -> None:
        """Fill the pipeline, change how it is filled, or stop filling it, if the gain is large enough."""
        if not self._fillings or (self.filled is not None and self.costs.is_measuring(self.filled)):
            return
        best = max(self._fillings, key=self._value_filled)
        if best != self.filled and self._value_filled(best) > self._present_value + SWITCH_GAIN:
            self.costs.start_measurement(best)
            self.filled = best
        elif self.filled is not None:
            filled = self._value_filled(self.filled)
            if self._value(self.depth) > filled + SWITCH_GAIN:
                self.filled = None

    def _undecided(self, probe: int) -> bool:
        """Return whether more steps at the probed depth could show it to be the best."""
        if self.costs.is_measuring(Shape(probe + 1)):
            return True
        goal = self._present_value + SWITCH_GAIN
        optimistic = self.acceptance.by_position(probe, OPTIMISM)
        return self._value(probe) <= goal < self._value(probe, optimistic)

    def _switch_depth(self) -> None:
        """Change to the best measured depth if the gain is large enough."""
        measured = [d for d in range(self.max_depth + 1) if self.costs.is_measured(Shape(d + 1))]
        best = max(measured, key=self._value, default=self.depth)
        if self._value(best) > self._value(self.depth) + SWITCH_GAIN:
            self.depth = best
            self._interval = max(FIRST_INTERVAL, self._interval // 4)
            self._next_probe = self._step + self._interval

    def _worth_probing(self) -> int | None:
        """Return the depth to probe now, or None.

        It is the next untried depth, or at the end of an interval a depth out of use.
        """
        if self.filled is not None and self.costs.is_measuring(self.filled):
            return None
        goal = self._present_value + SWITCH_GAIN
        untried = max(self._last_probed) + 1
        optimistic = self.acceptance.by_position(self.max_depth, OPTIMISM)
        if untried <= self.max_depth and self._value(untried, optimistic) > goal:
            return untried
        if self._step < self._next_probe:
            return None
        self._interval = min(2 * self._interval, LAST_INTERVAL)
        self._next_probe = self._step + self._interval
        candidates = self._doubtful(goal)
        return min(candidates, key=lambda d: self._last_probed.get(d, 0), default=None)

    def _doubtful(self, goal: float) -> list[int]:
        """Return the depths out of use that may have become better than `goal` since their last use."""
        # Plain decoding is always included: only its known cost ensures that speculation never costs.
        depths = [d for d in range(self.depth) if d == 0 or self._value(d) + COST_DOUBT > goal]
        known = self.acceptance.by_position(self.max_depth)
        optimistic = known[: self.depth] + [
            max(c, OPTIMISTIC_ACCEPTANCE) for c in known[self.depth :]
        ]
        following = self.depth + 1
        deeper = range(following, self.max_depth + 1)
        if deeper and (
            self._value(following, optimistic) + COST_DOUBT > goal
            or any(self._value(d, optimistic) > goal for d in deeper)
        ):
            depths.append(
                following
            )  # the shallowest depth that shows whether drafts are accepted again
        return depths

    def _start_probe(self, depth: int) -> None:
        if depth > self.depth and self.filled is None:
            self.acceptance.fade(first=self.depth)
        self.costs.start_measurement(Shape(depth + 1))
        self._probe = depth
        self._probe_ends = self._step + LONGEST_PROBE
        self._last_probed[depth] = self._step
