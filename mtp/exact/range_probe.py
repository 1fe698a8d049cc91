"""The check of a row range on real weights: rows must have the same bits in calls of every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mtp.exact.row_range import RowRange
from proto.errors import UsageError

Rows = Callable[..., mx.array]


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Return whether two arrays of one type have the same bits."""
    kind = {2: mx.uint16, 4: mx.uint32}[a.itemsize]
    return a.dtype == b.dtype and bool(mx.array_equal(a.view(kind), b.view(kind)).item())


def narrowed(function: Rows, inputs: Sequence[mx.array], rows: RowRange) -> RowRange | None:
    """Return the part of `rows` that holds for `function`, from its lower end on, or None if not even that holds.

    `inputs` are arrays of equally many rows, at least `rows.low`, which limit the sizes that are tried. A size holds
    when each of its rows has the bits that it has in a call of `rows.low` rows, at whatever place.
    """
    most = inputs[0].shape[0]
    low = rows.low
    parts = [
        function(*[x[start : start + low] for x in inputs])
        for start in range(0, most - low + 1, low)
    ]
    expected = mx.concatenate(parts)
    shifted = function(*[mx.roll(x[:low], 1, 0) for x in inputs])
    if not same_bits(mx.roll(shifted, -1, 0), expected[:low]):
        return None
    high = low
    top = most if rows.high is None else min(rows.high, most)
    for size in RowRange(low, top).sizes[1:]:
        known = min(size, expected.shape[0])
        if not same_bits(function(*[x[:size] for x in inputs])[:known], expected[:known]):
            return RowRange(low, high)
        high = size
    return rows


def choose_range(
    function: Rows, inputs: Sequence[mx.array], ranges: Sequence[RowRange]
) -> RowRange:
    """Return the first of `ranges` that holds, narrowed to what holds.

    Raises UsageError if `function` gives different bits for the same row in equal calls.
    """
    for rows in ranges:
        found = narrowed(function, inputs, rows)
        if found is not None:
            return found
    raise UsageError(
        "a product gives different bits in equal calls on this machine, so --exact is impossible here. "
        "Leave out --exact"
    )
