"""The trends of known series."""

from __future__ import annotations

import pytest

from tests.chaos.trend import trend_of

NOISE = (3.0, -2.0, 1.0, -3.0, 0.0, 2.0, -1.0)
"""Seven samples of noise whose sum is zero."""


@pytest.mark.parametrize(
    ("growth", "noise", "direction"),
    [
        (0.0, 1.0, "flat"),
        (0.5, 0.0, "flat"),
        (40.0, 1.0, "grows"),
        (-40.0, 1.0, "falls"),
        (2.0, 20.0, "flat"),
    ],
)
def test_the_direction_of_a_series(growth: float, noise: float, direction: str) -> None:
    """A small growth is flat, and so is one that the noise may explain. 3 % of the mean of 100 are 3."""
    count = 140
    values = [
        100.0 + growth * (place / count - 0.5) + noise * NOISE[place % len(NOISE)]
        for place in range(count)
    ]
    trend = trend_of(values)
    assert trend.direction(0.03) == direction
    assert trend.low <= trend.growth <= trend.high
    assert abs(trend.growth - growth) < 1.0 + noise
