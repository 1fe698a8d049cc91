"""What the controller knows: how often drafts are kept, and what steps cost. Plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

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

    def observe(self, width: int, kept: int) -> None:
        """A window of `width` tokens of which `kept` were right. Drafts after the first wrong one say nothing."""
        if not 1 <= kept <= width:
            raise ValueError(f"{kept} of {width} tokens kept")
        forget = 1 - 1 / MEMORY_WINDOWS
        for position in range(min(kept, width - 1)):
            if position == len(self._seen):
                self._kept.append(0.0)
                self._seen.append(0.0)
            right = position + 1 < kept
            self._kept[position] = self._kept[position] * forget + right
            self._seen[position] = self._seen[position] * forget + 1

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
    """Cost of a step by width, as a logarithm, over a level that all widths share.

        log seconds = level + relative[width] + noise

    The level follows whatever slows every step alike (other programs, heat, a longer context), so a width that
    was timed in quiet and one timed under load can still be compared.
    """

    def __init__(self) -> None:
        self._relative: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._fresh: dict[int, list[float]] = {}
        self._recent: deque[float] = deque(maxlen=LEVEL_SAMPLES)

    def start(self, width: int) -> None:
        """Measure `width`, for the first time or anew: its next FIRST_SAMPLES samples say what it costs."""
        self._fresh[width] = []

    def measuring(self, width: int) -> bool:
        """Whether a start has not come to its end yet."""
        return width in self._fresh

    def measured(self, width: int) -> bool:
        return width in self._relative

    def observe(self, width: int, seconds: float) -> None:
        """One step of `width` took so long. A width that was never started is ignored."""
        logarithm = math.log(max(seconds, 1e-9))
        if width in self._fresh:
            self._fresh[width].append(logarithm - self._level())
            if len(self._fresh[width]) == FIRST_SAMPLES:
                self._renew(width, self._fresh.pop(width))
        elif width in self._relative:
            if self._samples[width] < SETTLED_SAMPLES:
                self._refine(width, logarithm)
            self._recent.append(logarithm - self._relative[width])

    def relative(self, width: int) -> float:
        """Logarithm of the cost over the level.

        Of a width not measured, the least it is supposed to be: every further token costs at least half of what
        the last measured one did.
        """
        if width in self._relative:
            return self._relative[width]
        known = [math.exp(self._relative[w]) for w in range(1, width) if w in self._relative]
        if len(known) < 2:
            return math.log(known[-1]) if known else 0.0
        return math.log(known[-1] + max(0.0, known[-1] - known[-2]) / 2)

    def _renew(self, width: int, samples: list[float]) -> None:
        """Take the median of fresh samples, halfway to the old estimate where there is one."""
        if not self._relative:  # the first width defines the level
            self._recent.extend(samples)
            self._relative[width] = 0.0
        elif width in self._relative:
            self._relative[width] = (self._relative[width] + median(samples)) / 2
        else:
            self._relative[width] = median(samples)
        self._samples[width] = FIRST_SAMPLES

    def _refine(self, width: int, logarithm: float) -> None:
        """Improve a new estimate by one more sample."""
        surprise = logarithm - self._level() - self._relative[width]
        surprise = max(-LARGEST_SURPRISE, min(LARGEST_SURPRISE, surprise))
        self._samples[width] += 1
        self._relative[width] += surprise / self._samples[width]

    def _level(self) -> float:
        return median(self._recent) if self._recent else 0.0
