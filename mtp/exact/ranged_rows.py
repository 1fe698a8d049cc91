"""A module that calls another one with numbers of rows of one range only."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mtp.exact.row_range import RowRange


class RangedRows(nn.Module):
    """A row-wise function that is called with the sizes of one range only.

    More rows are cut into calls. A call that is not full is padded by repeating its last row.
    """

    def __init__(self, inner: Callable[..., mx.array], rows: RowRange) -> None:
        super().__init__()
        self.inner = inner
        self.rows = rows

    def __call__(self, *inputs: mx.array) -> mx.array:
        """Return `inner` of `inputs`, each `[rows, …]`: `[rows, …]`."""
        count = inputs[0].shape[0]
        parts = cuts(count, self.rows)
        if parts == [(0, count, count)]:
            return self.inner(*inputs)
        outputs = [
            self._call([x[start:stop] for x in inputs], size - (stop - start))
            for start, stop, size in parts
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _call(self, inputs: list[mx.array], missing: int) -> mx.array:
        if not missing:
            return self.inner(*inputs)
        padded = [mx.concatenate([x, mx.repeat(x[-1:], missing, axis=0)]) for x in inputs]
        return self.inner(*padded)[: inputs[0].shape[0]]


def cuts(count: int, rows: RowRange) -> list[tuple[int, int, int]]:
    """Return the start, the end and the size of each call for `count` rows: few calls, and little padding."""
    if rows.high is None:
        return [(0, count, count)]
    sizes, found, start = rows.sizes, [], 0
    while start < count:
        left = count - start
        full = max((size for size in sizes if size <= left), default=0)
        wider = next((size for size in sizes if size >= left), 0)
        # Padding costs less than another call, up to a quarter of the rows.
        if not full or (wider and wider <= max(left + 4, left * 5 // 4)):
            full = wider
        found.append((start, min(start + full, count), full))
        start += full
    return found
