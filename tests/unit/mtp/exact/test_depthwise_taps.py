"""The sum over taps is the convolution."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtp.layers.exact import DepthwiseTaps, is_depthwise


@pytest.mark.parametrize("width", [1, 5])
def test_the_sum_over_taps_is_the_convolution(width: int) -> None:
    convolution = nn.Conv1d(6, 6, 4, groups=6, bias=False)
    assert is_depthwise(convolution)
    x = mx.random.normal((2, width + 3, 6))
    assert mx.allclose(DepthwiseTaps(convolution)(x), convolution(x), atol=1e-6)


def test_other_convolutions_stay() -> None:
    assert not is_depthwise(nn.Conv1d(6, 6, 4, bias=False))
    assert not is_depthwise(nn.Conv1d(6, 6, 4, groups=6, bias=True))
    assert not is_depthwise(nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=False))
