"""Goodness of fit without a statistics library: Pearson's chi-square and its distance from the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chi_square(counts: Sequence[int], chances: Sequence[float]) -> float:
    """Return Pearson's statistic of `counts` against `chances`, which sum to 1.

    A count where the chance is 0 gives infinity.
    """
    total = sum(counts)
    statistic = 0.0
    for count, chance in zip(counts, chances, strict=True):
        if chance > 0:
            statistic += (count - total * chance) ** 2 / (total * chance)
        elif count:
            return math.inf
    return statistic


def sigmas(statistic: float, freedom: int) -> float:
    """Return how many standard deviations a normal variable as unlikely as `statistic` lies from its mean.

    `freedom` is the number of degrees of freedom. Uses Wilson and Hilferty's cube-root approximation (1931), accurate
    to a few hundredths from 3 degrees on.
    """
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
