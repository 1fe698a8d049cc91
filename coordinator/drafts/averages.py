"""The measurements behind the choice of drafts: acceptance by position, and the cost of a step by its shape."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean, median
from typing import NamedTuple


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


# ---- acceptance


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


MEMORY_WINDOWS = 48
"""Windows. Time constant of the acceptance, whose noise is then 1/sqrt(96)."""

FIRST_ACCEPTANCE = 0.75
"""Acceptance of a first draft before any was seen: a little below published runs of Qwen3.5 heads."""

FIRST_WINDOWS, NEXT_WINDOWS = 1.5, 4.0
"""Windows. Weight of FIRST_ACCEPTANCE, and at later positions of the acceptance at the position before."""


class Acceptance:
    """The chance that draft i + 1 of a window is accepted if draft i was, as moving averages."""

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

    def by_position(self, depth: int) -> list[float]:
        """Return the chance of each of the first `depth` drafts, given that the drafts before it were accepted."""
        chances: list[float] = []
        chance = FIRST_ACCEPTANCE
        for position in range(depth):
            if position < len(self._drafted):
                prior = NEXT_WINDOWS if position else FIRST_WINDOWS
                windows = self._drafted[position] + prior
                chance = (self._accepted[position] + prior * chance) / windows
            chances.append(chance)
        return chances

    def limit_weight(self, first: int, windows: float) -> None:
        """Let the results at index `first` (0 is the first draft) and after it weigh at most `windows` windows."""
        for position in range(first, len(self._drafted)):
            share = min(1.0, windows / max(self._drafted[position], 1.0))
            self._accepted[position] *= share
            self._drafted[position] *= share


def expected_tokens(chances: Sequence[float]) -> float:
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
    windows += reach * onward ** (width - behind) / (1 - onward**width)
    return tokens, windows


# ---- costs


@dataclass(frozen=True)
class StepCost:
    """The cost of a micro-batch step, in seconds.

    `seconds` pass until its sequences have its tokens. `interval` is the time since the window before a speculative one
    returned, and 0 of other windows. `stages` are the stages' own times. A step `ahead` was sent while the one before
    it was in flight, which hides the time to build it. Steps of plain decoding do so, unless prompts arrive.
    """

    seconds: float
    interval: float = 0.0
    stages: tuple[float, ...] = ()
    ahead: bool = False


SAMPLES = 7
"""Steps. A cost is the median of this many, so that hiccups do not count."""

MEASURED_SAMPLES = 3
"""Steps after which a shape has a cost."""

HICCUP = 2.0
"""Ratio to the fastest step above which a step of the same shape is no sample, such as the first use of a kernel."""

NARROWEST_STEP = 0.75
"""Widths. Minimum mean width of the windows of a step for which it shows the cost of this width."""

INTERVALS = 24
"""Windows. An interval of a filled pipeline is the mean of this many, because intervals are uneven."""

LONG_INTERVAL = 3.0
"""Medians. A longer interval counts as this many, because it shows a hiccup."""

OLD_STEPS, FORGOTTEN_STEPS = 32, 512
"""Steps out of use after which the next samples outvote the earlier ones, and after which a cost is unknown again."""


@dataclass
class _Samples:
    """The newest steps of one shape. `newest` is the number of the last one, counted over all shapes.

    `gaps` are the seconds by which the last of several stages took longer than each other.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    newest: int = 0

    def usual(self) -> float | None:
        """Return the seconds of a step, None while there are too few. If most steps are slow, the machine is."""
        near = [seconds for seconds in self.seconds if seconds <= HICCUP * min(self.seconds)]
        if len(near) >= MEASURED_SAMPLES:
            return median(near)
        return median(self.seconds) if len(self.seconds) == SAMPLES else None


class StepCosts:
    """The seconds of a step of `sequences`, by the tokens that it verifies and the drafts that it requests.

    Both count for one sequence. Windows of a step may differ in width, and then their mean counts. A step of fewer
    sequences counts with the seconds of the rows that it lacks. Otherwise ended answers would make a shape look fast.
    """

    def __init__(self, sequences: int = 1) -> None:
        self.sequences = sequences
        self._samples: dict[tuple[float, int, bool], _Samples] = {}
        """By width, drafts, and whether the steps ran ahead."""
        self._intervals: dict[Shape, deque[float]] = {}
        self._steps = 0
        self._stages = 1
        self._measured: dict[tuple[float, int], float] = {}

    def record_step(self, width: float, drafts: int, cost: StepCost, shape: Shape, lacking: int = 0) -> None:
        """Record a step, in which `lacking` of the sequences had no window. Its interval is one of windows of `shape`.

        The windows of new or ending texts are narrower. A step in which they are few counts as one of `shape`.
        """
        self._steps += 1
        nearly = drafts == shape.depth and NARROWEST_STEP * shape.width <= width <= shape.width
        key = shape.width if nearly else math.ceil(4 * width) / 4, drafts
        samples = self._samples.setdefault((*key, cost.ahead), _Samples())
        if self._steps - samples.newest > OLD_STEPS:
            # The cost of plain decoding is always known, because all others are compared with it.
            kept = MEASURED_SAMPLES - 1 if key == (1, 0) else 1
            while len(samples.seconds) > kept:
                samples.seconds.popleft()
        samples.newest, self._stages = self._steps, max(1, len(cost.stages))
        if self._stages > 1:
            samples.gaps.append(cost.stages[-1] - max(cost.stages[:-1]))
        # A further row never costs more than the mean row of the step.
        row = min(self._row_seconds(), cost.seconds / (width * (self.sequences - lacking)))
        samples.seconds.append(cost.seconds + lacking * width * row)
        if cost.interval:
            self._intervals.setdefault(shape, deque(maxlen=INTERVALS)).append(cost.interval)
        self._measured = {
            key[:2]: usual
            for key, known in sorted(self._samples.items(), key=itemgetter(0))  # steps ahead come last, and count
            if (usual := known.usual()) is not None
            and (key[:2] == (1, 0) or self._steps - known.newest <= FORGOTTEN_STEPS)
        }

    def _row_seconds(self) -> float:
        """Return the seconds of a row: those between the narrowest and the widest measured windows, by their rows."""
        (low, first), (high, last) = min(self._measured, default=(1, 0)), max(self._measured, default=(1, 0))
        if low == high:
            return 0.0
        more = self._measured[high, last] - self._measured[low, first]
        return max(0.0, more) / ((high - low) * self.sequences)

    def is_measured(self, shape: Shape) -> bool:
        """Return whether the cost of `shape` is measured, and not forgotten. That of plain decoding never is."""
        return (shape.width, shape.depth) in self._measured

    def steps_since(self, shape: Shape) -> int:
        """Return the steps since `shape` was last used."""
        kinds = (self._samples.get((shape.width, shape.depth, ahead)) for ahead in (False, True))
        return self._steps - max((samples.newest for samples in kinds if samples), default=0)

    @property
    def ran_ahead(self) -> bool:
        """Return whether plain decoding was measured while it ran ahead."""
        samples = self._samples.get((1, 0, True))
        return samples is not None and samples.usual() is not None

    @property
    def widest(self) -> float:
        """Width of the widest measured windows with drafts of the head. Those of a step that asks for none are few."""
        return max((width for width, drafts in self._measured if drafts), default=1.0)

    def seconds(self, width: float, drafts: int) -> float:
        """Return the seconds of a step. They follow from other widths if it is not measured, and are 1 without any."""
        if (width, drafts) in self._measured:
            return self._measured[width, drafts]
        draft = self._draft_seconds()
        alike = {w for w, d in self._measured if (d > 0) == (drafts > 0)}
        rows: dict[float, float] = {}
        for (w, d), seconds in self._measured.items():
            if w == 1 or len(alike) < 2 or (d > 0) == (drafts > 0):
                rows[w] = max(1e-9, min(seconds - draft * d, rows.get(w, math.inf)))
        return _at(width, rows) + draft * drafts if rows else 1.0

    def interval(self, shape: Shape) -> float:
        """Return the seconds between the returns of two windows of a filled pipeline.

        If they are not measured, the slowest stage determines them, or the share of a window in a pass.
        """
        if shape in self._intervals:
            usual = median(self._intervals[shape])
            return fmean(min(interval, LONG_INTERVAL * usual) for interval in self._intervals[shape])
        seconds = self.seconds(shape.width, shape.depth)
        drafts = shape.depth * self._draft_seconds()
        return max(seconds / shape.fill, (seconds - drafts) / self._stages + drafts)

    def _draft_seconds(self) -> float:
        """Return the seconds of a draft on several stages; 0 while no step shows them.

        A further row takes about the same time on every stage, and a draft only on the last one.
        """
        gaps = [
            (drafts, median(known.gaps))
            for (_, drafts, _), known in self._samples.items()
            if len(known.gaps) >= MEASURED_SAMPLES
        ]
        first, last = min(gaps, default=(0, 0.0)), max(gaps, default=(0, 0.0))
        return max(0.0, last[1] - first[1]) / max(1, last[0] - first[0])


def _at(width: float, known: Mapping[float, float]) -> float:
    """Return the seconds of `width` from the `known` widths around it, or with half of the last slope."""
    if width in known:
        return known[width]
    below = sorted(w for w in known if w < width)
    above = sorted(w for w in known if w > width)
    if not below:
        return known[above[0]]
    last = below[-1]
    slope = 0.0
    if above:
        slope = (known[above[0]] - known[last]) / (above[0] - last)
    elif len(below) > 1:
        slope = max(0.0, known[last] - known[below[-2]]) / (last - below[-2]) / 2
    return known[last] + slope * (width - last)
