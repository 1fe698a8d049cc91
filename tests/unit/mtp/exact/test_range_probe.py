"""The probe narrows a range to what holds, against products whose rounding depends on the rows of a call."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from mtp.device import Arithmetic
from mtp.layers import exact
from proto.errors import UsageError

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
    assert (
        exact.choose_range(product, [X], exact.candidates(CUDA, exact.Product.DENSE))
        == exact.SINGLE
    )


def test_a_product_that_differs_in_equal_calls_is_refused() -> None:
    calls = itertools.count()

    def product(x: mx.array) -> mx.array:
        return x + next(calls)

    with pytest.raises(UsageError, match=r"different bits in equal calls.*Leave out --exact"):
        exact.choose_range(product, [X], exact.candidates(CUDA, exact.Product.AFFINE))


@pytest.mark.parametrize("product", list(exact.Product))
@pytest.mark.parametrize(
    "device", ["metal applegpu_g13s", "metal applegpu_g16s", "cuda sm_90", "cpu x"]
)
def test_every_machine_has_a_range_for_every_product(product: exact.Product, device: str) -> None:
    backend, architecture = device.split()
    ranges = exact.candidates(Arithmetic(backend, architecture, "1"), product)
    assert ranges[-1] == (exact.EVERY if backend == "cpu" else exact.SINGLE)
    assert all(r.high is None or 1 <= r.low <= r.high for r in ranges)


def test_same_bits_tells_zeros_of_both_signs_apart() -> None:
    assert not exact.same_bits(mx.array([0.0]), mx.array([-0.0]))
    assert exact.same_bits(mx.array([float("nan")]), mx.array([float("nan")]))
