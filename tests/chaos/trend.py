"""The trend of a series of samples, with its confidence interval."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
"""Blocks of samples whose means give the trend. Single samples depend on the samples before them."""

STUDENT = 2.228
"""The 97.5 % quantile of Student's distribution with BLOCKS - 2 degrees of freedom."""


@dataclass(frozen=True)
class Trend:
    """The growth of a series from its first to its last sample, with its 95 % interval, and the series' mean."""

    growth: float
    low: float
    high: float
    mean: float

    def direction(self, tolerance: float) -> str:
        """Return "grows", "falls" or "flat".

        A curve is flat if zero growth is in the interval, or the interval within `tolerance` of the mean.
        """
        bound = tolerance * abs(self.mean)
        if self.low <= 0 <= self.high or -bound <= self.low <= self.high <= bound:
            return "flat"
        return "grows" if self.growth > 0 else "falls"


def trend_of(values: Sequence[float]) -> Trend:
    """Return the trend of at least BLOCKS values, by least squares over the means of blocks."""
    assert len(values) >= BLOCKS
    edges = [len(values) * block // BLOCKS for block in range(BLOCKS + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    places = [(number + 0.5) / BLOCKS for number in range(BLOCKS)]
    slope, intercept = statistics.linear_regression(places, means)
    left = [m - slope * p - intercept for p, m in zip(places, means, strict=True)]
    spread = sum((place - 0.5) ** 2 for place in places)
    error = STUDENT * (sum(r * r for r in left) / (BLOCKS - 2) / spread) ** 0.5
    return Trend(slope, slope - error, slope + error, statistics.fmean(values))
