"""Exact functions: calls within a row range, equal to the function row by row, and a convolution as a sum over taps."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp.layers.exact import EVERY, DepthwiseTaps, RangedRows, RowRange, cuts, is_depthwise


class Recorded:
    """A row-wise function that records the sizes of its calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, *inputs: mx.array) -> mx.array:
        self.sizes.append(inputs[0].shape[0])
        assert all(x.shape[0] == inputs[0].shape[0] for x in inputs)
        return mx.concatenate(list(inputs), axis=-1) * 2


@given(
    count=st.integers(1, 60),
    low=st.integers(1, 9),
    more=st.integers(0, 20) | st.none(),
    inputs=st.integers(1, 2),
)
def test_every_call_is_in_the_range_and_every_row_is_its_own(
    count: int, low: int, more: int | None, inputs: int
) -> None:
    rows = RowRange(low, None if more is None else low + more)
    function = Recorded()
    x = mx.arange(count * 3).reshape(count, 3)
    given_ = [x + i for i in range(inputs)]
    found = RangedRows(function, rows)(*given_)
    assert mx.array_equal(found, mx.concatenate(given_, axis=-1) * 2)
    if rows.high is None:
        assert function.sizes == [count]
    else:
        assert set(function.sizes) <= set(rows.sizes)


@pytest.mark.parametrize(
    ("count", "rows", "expected"),
    [
        (5, EVERY, [(0, 5, 5)]),
        (5, RowRange(2, 2), [(0, 2, 2), (2, 4, 2), (4, 5, 2)]),
        (3, RowRange(8, 9), [(0, 3, 8)]),
        (10, RowRange(2, 512), [(0, 10, 11)]),
        (300, RowRange(2, 512), [(0, 256, 256), (256, 300, 48)]),
        (1025, RowRange(2, 512), [(0, 512, 512), (512, 1024, 512), (1024, 1025, 2)]),
    ],
)
def test_cuts_use_sizes_that_the_probe_has_tried(
    count: int, rows: RowRange, expected: list[tuple[int, int, int]]
) -> None:
    assert cuts(count, rows) == expected


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
