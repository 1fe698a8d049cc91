"""How many tokens to draft: the depth with the most tokens a second, from what steps cost and what was kept.

    tokens a second at depth k  ~  (1 + a_1 + a_1 a_2 + … + a_1…a_k) / cost of a step of width k + 1

with a_i the chance that draft i is kept once those before it were. Plain decoding, depth 0, always competes.

A depth not in use shows neither its cost nor (beyond the depth in use) its acceptance, so it is *probed*: used for a
few steps, more while it could still turn out best. At the start depths are probed from 0 up, as long as the
next one could win by what is known. Later probes, of plain decoding, of other shallower depths that come near
and of the next deeper one if there is hope, take turns at intervals that double while nothing comes of them.

Simulated with dear and cheap verification and five acceptance profiles, all this costs 1.5 % over 1,000 tokens from a
cold start and 0.8 % over 4,000, against the best fixed depth (tests/unit/mtp/test_controller.py).

No clock is read and no random number drawn: what is observed decides. Tokens do not depend on the depth
(DESIGN §1), so a wrong choice costs time and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mtp.depth.estimates import (
    FIRST_SAMPLES,
    AcceptanceEstimate,
    StepCost,
    StepCosts,
    expected_kept,
    expected_run,
)
from mtp.depth.shape import Shape
from proto.errors import UsageError

MAX_DEPTH = 8
"""Deepest draft that can be asked for. At .7 a draft, the ninth is kept in 4 of 100 windows."""

AUTO_DEPTH = 4
"""Deepest draft that `auto` considers."""


@dataclass(frozen=True)
class MtpMode:
    """What `--mtp` says: a fixed depth, 0 for `off`, `filled`, or neither for `auto`."""

    depth: int | None = None
    filled: bool = False

    @classmethod
    def parse(cls, text: str) -> MtpMode:
        """Raises UsageError for anything but `auto`, `off`, `filled` or a depth up to MAX_DEPTH."""
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
"""A depth takes over when it promises this much more: estimates are not better than that."""

OPTIMISM = 0.6
"""Standard errors of acceptance allowed to a depth that could be tried, or tried longer."""

HOPED_ACCEPTANCE = 0.9
"""What a position out of use is supposed to have become when a later probe is considered."""

COST_DOUBT = math.log(1.1)
"""How much cheaper than its estimate a depth out of use is supposed to be then."""

FILLED_WIDTHS = (1, 2)
"""Of windows in a filled pipeline. A window is verified no sooner for being wide there: width pays only where a
stage takes hardly longer for it."""

SHARE_STEPS = 8
"""Time constant of the slowest stage's share of a pass."""

FIRST_INTERVAL = 96
LAST_INTERVAL = 512
"""Steps between probes: where they start and where doubling ends."""

LONGEST_PROBE = 4 * FIRST_SAMPLES
"""Steps after which a probe ends whatever it has measured, as when every request is a few tokens long."""


class Controller:
    """Chooses the depth of each step, for any number of sequences that step together.

    One controller serves a whole process: acceptance is a matter of the text, shared by all; costs are kept apart
    for 1, 2, 3-4, 5-8, … sequences a step.
    """

    def __init__(self, mode: MtpMode, max_depth: int = AUTO_DEPTH) -> None:
        self.mode = mode
        self.max_depth = max_depth
        self.acceptance = AcceptanceEstimate()
        self._searches: dict[tuple[int, int], _Search] = {}

    def choose(self, sequences: int = 1, fill: int = 1) -> Shape:
        """The shape of the next window of so many sequences that step together, each of which may have up to `fill`
        windows in flight. Call once a step."""
        if self.mode.depth is not None:
            return Shape(self.mode.depth + 1)
        if self.mode.filled:
            return Shape(1, fill)
        return self._search(sequences, fill).choose()

    def observe_drafts(self, drafts: Iterable[tuple[int, bool]]) -> None:
        """What became of a window's drafts: number in their chain, from 1, and whether each was right. Not for
        windows that were cancelled."""
        self.acceptance.observe(drafts)

    def observe_step(
        self, sequences: int, width: int, drafted: int, cost: StepCost, fill: int = 1
    ) -> None:
        """A step verified windows of `width` and drafted `drafted` more tokens for each.

        Not for steps that carried prompt tokens or windows of unlike widths. A step between two shapes, which
        verified for one and drafted for the other, is passed over.
        """
        if self.mode.depth is None and not self.mode.filled:
            self._search(sequences, fill).observe(width, drafted, cost)

    def forget_costs(self) -> None:
        """Other machines, or other cuts, serve from now on: steps cost something else. Acceptance stays."""
        self._searches.clear()

    def _search(self, sequences: int, fill: int) -> _Search:
        key = ((sequences - 1).bit_length(), fill)
        if key not in self._searches:
            self._searches[key] = _Search(self.max_depth, self.acceptance, fill)
        return self._searches[key]


class _Search:
    """The search for the best shape at one number of sequences: the best depth of a block, and, where the pipeline
    has room for `fill` windows of a sequence, whether filling it is better."""

    def __init__(self, max_depth: int, acceptance: AcceptanceEstimate, fill: int) -> None:
        self.max_depth = max_depth
        self.acceptance = acceptance
        self.costs = StepCosts()
        self.depth = 0
        self.filled: Shape | None = None
        """The filled pipeline in use."""
        shapes = [Shape(width, fill) for width in FILLED_WIDTHS if fill > 1]
        self._fillings = [shape for shape in shapes if shape.depth <= MAX_DEPTH]
        self._shares: dict[bool, float] = {}
        """How much of a pass goes by between two windows of a sequence: as the slowest stage allows, and as seen."""
        self._returned = 0
        self._step = 0
        self._probe: int | None = None
        self._probe_ends = 0
        self._last_probed: dict[int, int] = {}
        self._interval = FIRST_INTERVAL
        self._next_probe = FIRST_INTERVAL
        self._start_probe(0)

    def observe(self, width: int, drafted: int, cost: StepCost) -> None:
        for shape in (Shape(width), *self._fillings):
            if (shape.width, shape.depth) == (width, drafted):
                self.costs.observe(shape, cost.seconds)
        share = cost.interval / cost.seconds
        before = self._shares.setdefault(cost.ahead, share)
        self._shares[cost.ahead] = before + (share - before) / SHARE_STEPS

    def choose(self) -> Shape:
        if self.filled is not None and self._probe is None:
            self._returned += 1
            if self._returned % self.filled.fill:
                return self.filled  # a step, to the search below, is a pass through all stages
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
        self._settle()
        self._settle_filled()
        candidate = self._worth_probing()
        if candidate is None:
            return self.depth
        self._start_probe(candidate)
        return candidate

    def _value(self, depth: int, chances: list[float] | None = None) -> float:
        """Logarithm of tokens a second, up to a constant."""
        if chances is None:
            chances = self.acceptance.by_position(depth)
        return math.log(expected_kept(chances[:depth])) - self.costs.relative(Shape(depth + 1))

    def _value_filled(self, shape: Shape) -> float:
        """The same of a filled pipeline, over a run from one failed hope to the next: a pass until the first window
        is back, then one window an interval."""
        run = expected_run(self.acceptance.by_position(shape.depth), shape.width)
        share = self._shares.get(True, self._shares.get(False, 1.0))
        interval = max(1 / shape.fill, share)
        passes = 1 + (run.windows - 1) * interval
        return math.log(run.tokens / passes) - self.costs.relative(shape)

    @property
    def _present(self) -> float:
        """The value of what is in use."""
        block = self._value(self.depth)
        return block if self.filled is None else max(block, self._value_filled(self.filled))

    def _settle_filled(self) -> None:
        """Fill the pipeline, fill it otherwise, or leave that, if it is better by enough."""
        if not self._fillings or (self.filled is not None and self.costs.measuring(self.filled)):
            return
        best = max(self._fillings, key=self._value_filled)
        if best != self.filled and self._value_filled(best) > self._present + SWITCH_GAIN:
            self.costs.start(best)
            self.filled = best
        elif self.filled is not None:
            filled = self._value_filled(self.filled)
            if self._value(self.depth) > filled + SWITCH_GAIN:
                self.filled = None

    def _undecided(self, probe: int) -> bool:
        """Whether more steps at the probed depth could show it to be the best."""
        if self.costs.measuring(Shape(probe + 1)):
            return True
        goal = self._present + SWITCH_GAIN
        hoped = self.acceptance.by_position(probe, OPTIMISM)
        return self._value(probe) <= goal < self._value(probe, hoped)

    def _settle(self) -> None:
        """Change to the best measured depth if it is better by enough."""
        measured = [d for d in range(self.max_depth + 1) if self.costs.measured(Shape(d + 1))]
        best = max(measured, key=self._value, default=self.depth)
        if self._value(best) > self._value(self.depth) + SWITCH_GAIN:
            self.depth = best
            self._interval = max(FIRST_INTERVAL, self._interval // 4)
            self._next_probe = self._step + self._interval

    def _worth_probing(self) -> int | None:
        """The depth to probe now, if any: the next one never tried, or, when the time has come, one out of use."""
        if self.filled is not None and self.costs.measuring(self.filled):
            return None
        goal = self._present + SWITCH_GAIN
        untried = max(self._last_probed) + 1
        hoped = self.acceptance.by_position(self.max_depth, OPTIMISM)
        if untried <= self.max_depth and self._value(untried, hoped) > goal:
            return untried
        if self._step < self._next_probe:
            return None
        self._interval = min(2 * self._interval, LAST_INTERVAL)
        self._next_probe = self._step + self._interval
        candidates = self._doubtful(goal)
        return min(candidates, key=lambda d: self._last_probed.get(d, 0), default=None)

    def _doubtful(self, goal: float) -> list[int]:
        """Depths out of use that may have become better than `goal` since they were last seen."""
        # Plain decoding always: that speculation never costs rests on knowing what it costs.
        depths = [d for d in range(self.depth) if d == 0 or self._value(d) + COST_DOUBT > goal]
        known = self.acceptance.by_position(self.max_depth)
        hoped = known[: self.depth] + [max(c, HOPED_ACCEPTANCE) for c in known[self.depth :]]
        following = self.depth + 1
        deeper = range(following, self.max_depth + 1)
        if deeper and (
            self._value(following, hoped) + COST_DOUBT > goal
            or any(self._value(d, hoped) > goal for d in deeper)
        ):
            depths.append(following)  # the least that shows whether drafts are kept again
        return depths

    def _start_probe(self, depth: int) -> None:
        if depth > self.depth and self.filled is None:
            self.acceptance.fade(first=self.depth)
        self.costs.start(Shape(depth + 1))
        self._probe = depth
        self._probe_ends = self._step + LONGEST_PROBE
        self._last_probed[depth] = self._step
