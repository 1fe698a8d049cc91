"""How many tokens to draft: the depth with the most tokens a second, from what steps cost and what was kept.

    tokens a second at depth k  ~  (1 + a_1 + a_1 a_2 + … + a_1…a_k) / cost of a step of width k + 1

with a_i the chance that draft i is kept once those before it were. Plain decoding, depth 0, always competes.

A depth not in use shows neither its cost nor (beyond the depth in use) its acceptance, so it is *probed*: used for a
few steps. Each depth is probed once at the start, from 0 up, as long as it could win: a step of
width k + 1 costs no less than one of width k, and a draft is kept no more often than seen or, unseen, supposed.
Later probes come at intervals that double while nothing comes of them, which bounds their share of the time.

No clock is read and no random number drawn: what is observed decides. Tokens do not depend on the depth
(DESIGN §1), so a wrong choice costs time and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp.estimates import FIRST_SAMPLES, AcceptanceEstimate, StepCosts, expected_kept
from proto.errors import UsageError

MAX_DEPTH = 8
"""Deepest draft that can be asked for. At .7 a draft, the ninth is kept in 4 of 100 windows."""

AUTO_DEPTH = 4
"""Deepest draft that `auto` considers."""


@dataclass(frozen=True)
class MtpMode:
    """What `--mtp` says: a fixed depth, 0 for `off`, or None for `auto`."""

    depth: int | None = None

    @classmethod
    def parse(cls, text: str) -> MtpMode:
        """Raises UsageError for anything but `auto`, `off` or a depth up to MAX_DEPTH."""
        word = text.strip().lower()
        if word in ("auto", "off"):
            return cls(None if word == "auto" else 0)
        if word.isascii() and word.isdigit() and int(word) <= MAX_DEPTH:
            return cls(int(word))
        raise UsageError(
            f"--mtp {text!r}: write auto, off, or a number of drafts, 1 to {MAX_DEPTH}"
        )

    def __str__(self) -> str:
        if self.depth is None:
            return "auto"
        return str(self.depth) if self.depth else "off"


SWITCH_GAIN = math.log(1.02)
"""A depth takes over when it promises this much more: estimates are not better than that."""

HOPED_ACCEPTANCE = 0.9
"""What a position out of use is supposed to have become when a probe of it is considered."""

COST_DOUBT = math.log(1.1)
"""How much cheaper a shallower depth out of use may have become."""

FIRST_INTERVAL = 64
LAST_INTERVAL = 1024
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
        self._searches: dict[int, _DepthSearch] = {}

    def choose(self, sequences: int = 1) -> int:
        """How many tokens to draft in the next step of so many sequences. Call once a step."""
        if self.mode.depth is not None:
            return self.mode.depth
        return self._search(sequences).choose()

    def observe_window(self, width: int, kept: int) -> None:
        """`kept` of a window's `width` tokens were right. Not for windows that were cancelled."""
        self.acceptance.observe(width, kept)

    def observe_step(self, sequences: int, width: int, drafted: int, seconds: float) -> None:
        """A step verified windows of `width` and drafted `drafted` more tokens for each.

        `seconds` is how long it held up its sequences. Not for steps that carried prompt tokens or windows of
        unlike widths. A step between two depths, which verified for one and drafted for the other, is passed over.
        """
        if self.mode.depth is None and drafted == width - 1:
            self._search(sequences).costs.observe(width, seconds)

    def _search(self, sequences: int) -> _DepthSearch:
        size = (sequences - 1).bit_length()
        if size not in self._searches:
            self._searches[size] = _DepthSearch(self.max_depth, self.acceptance)
        return self._searches[size]


class _DepthSearch:
    """The search for the best depth at one number of sequences."""

    def __init__(self, max_depth: int, acceptance: AcceptanceEstimate) -> None:
        self.max_depth = max_depth
        self.acceptance = acceptance
        self.costs = StepCosts()
        self.depth = 0
        self._step = 0
        self._probe: _Probe | None = _Probe(depth=0, samples_wanted=FIRST_SAMPLES)
        self._last_probed: dict[int, int] = {}
        self._interval = FIRST_INTERVAL
        self._next_probe = FIRST_INTERVAL

    def choose(self) -> int:
        self._step += 1
        if self._probe is not None:
            self._probe.steps += 1
            if not self._probe.over(self.costs):
                return self._probe.depth
            self._end_probe(self._probe)
        self._settle()
        candidate = self._worth_probing()
        if candidate is None:
            return self.depth
        self._start_probe(candidate)
        return candidate

    def _value(self, depth: int, chances: list[float] | None = None) -> float:
        """Logarithm of tokens a second, up to a constant."""
        if chances is None:
            chances = self.acceptance.by_position(depth)
        return math.log(expected_kept(chances[:depth])) - self.costs.relative(depth + 1)

    def _settle(self) -> None:
        """Change to the best measured depth if it is better by enough."""
        measured = [d for d in range(self.max_depth + 1) if self.costs.measured(d + 1)]
        best = max(measured, key=self._value, default=self.depth)
        if self._value(best) > self._value(self.depth) + SWITCH_GAIN:
            self.depth = best
            self._interval = max(FIRST_INTERVAL, self._interval // 4)
            self._next_probe = self._step + self._interval

    def _worth_probing(self) -> int | None:
        """The depth to probe now, if any: the next one never tried, or, when the time has come, one out of use."""
        goal = self._value(self.depth) + SWITCH_GAIN
        untried = max(self._last_probed, default=0) + 1
        if untried <= self.max_depth and self._value(untried) > goal:
            return untried
        if self._step < self._next_probe:
            return None
        self._interval = min(2 * self._interval, LAST_INTERVAL)
        self._next_probe = self._step + self._interval
        known = self.acceptance.by_position(self.max_depth)
        hoped = known[: self.depth] + [max(c, HOPED_ACCEPTANCE) for c in known[self.depth :]]
        deeper = range(self.depth + 1, self.max_depth + 1)
        candidates = [d for d in deeper if self._value(d, hoped) > goal][:1]
        candidates += [d for d in range(self.depth) if self._value(d) + COST_DOUBT > goal]
        return min(candidates, key=lambda d: self._last_probed.get(d, 0), default=None)

    def _start_probe(self, depth: int) -> None:
        self.acceptance.fade(first=self.depth)
        self.costs.refresh(depth + 1)
        wanted = self.costs.samples(depth + 1) + FIRST_SAMPLES
        self._probe = _Probe(depth, wanted)

    def _end_probe(self, probe: _Probe) -> None:
        self._last_probed[probe.depth] = self._step
        self._probe = None


@dataclass
class _Probe:
    """A depth being tried until its width has so many samples."""

    depth: int
    samples_wanted: int
    steps: int = 0

    def over(self, costs: StepCosts) -> bool:
        measured = costs.samples(self.depth + 1) >= self.samples_wanted
        return measured or self.steps > LONGEST_PROBE
