"""Exact functions: calls within a row range, a convolution as a sum over taps, and the probe that narrows a range."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp.device import Arithmetic
from mtp.layers import exact
from mtp.layers.exact import EVERY, DepthwiseTaps, RangedRows, RowRange, cuts, is_depthwise
from proto.errors import UsageError


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


X = mx.random.normal((64, 4), key=mx.random.key(2))

CUDA = Arithmetic("cuda", "sm_90", "0.32.4")


def rounded_by_rows(*limits: int) -> exact.Rows:
    """Return a product with another rounding from each of `limits` rows on."""

    def product(x: mx.array) -> mx.array:
        kernel = sum(x.shape[0] >= limit for limit in limits)
        return x * (1 + kernel * 2**-10)

    return product


@pytest.mark.parametrize(
    ("limits", "rows", "expected"),
    [
        ((), exact.EVERY, exact.EVERY),
        ((2,), exact.RowRange(2, 64), exact.RowRange(2, 64)),
        ((2,), exact.EVERY, exact.RowRange(1, 1)),
        ((8,), exact.RowRange(1, 64), exact.RowRange(1, 7)),
        ((8, 33), exact.RowRange(8, 64), exact.RowRange(8, 32)),
    ],
)
def test_a_range_is_narrowed_to_what_holds(
    limits: tuple[int, ...], rows: exact.RowRange, expected: exact.RowRange
) -> None:
    assert exact.narrowed(rounded_by_rows(*limits), [X], rows) == expected


def test_a_product_whose_rows_depend_on_their_place_falls_back_to_single_rows() -> None:
    def product(x: mx.array) -> mx.array:
        return x * (1 + mx.arange(x.shape[0])[:, None] * 2**-10)

    assert exact.narrowed(product, [X], exact.RowRange(2, 16)) is None
    assert exact.choose_range(product, [X], exact.candidates(CUDA, exact.Product.DENSE)) == exact.SINGLE


def test_a_product_that_differs_in_equal_calls_is_refused() -> None:
    calls = itertools.count()

    def product(x: mx.array) -> mx.array:
        return x + next(calls)

    with pytest.raises(UsageError, match=r"different bits in equal calls.*Leave out --exact"):
        exact.choose_range(product, [X], exact.candidates(CUDA, exact.Product.AFFINE))


@pytest.mark.parametrize("product", list(exact.Product))
@pytest.mark.parametrize("device", ["metal applegpu_g13s", "metal applegpu_g16s", "cuda sm_90", "cpu x"])
def test_every_machine_has_a_range_for_every_product(product: exact.Product, device: str) -> None:
    backend, architecture = device.split()
    ranges = exact.candidates(Arithmetic(backend, architecture, "1"), product)
    assert ranges[-1] == (exact.EVERY if backend == "cpu" else exact.SINGLE)
    assert all(r.high is None or 1 <= r.low <= r.high for r in ranges)


def test_same_bits_tells_zeros_of_both_signs_apart() -> None:
    assert not exact.same_bits(mx.array([0.0]), mx.array([-0.0]))
    assert exact.same_bits(mx.array([float("nan")]), mx.array([float("nan")]))
