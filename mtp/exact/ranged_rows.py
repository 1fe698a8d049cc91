"""A module that calls another one with numbers of rows of one range only."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mtp.exact.row_range import RowRange


class RangedRows(nn.Module):
    """A row-wise function whose calls have `rows.low` to `rows.high` rows.

    Fewer rows are padded by repeating the last one. More rows are cut into calls.
    """

    def __init__(self, inner: Callable[..., mx.array], rows: RowRange) -> None:
        super().__init__()
        self.inner = inner
        self.rows = rows

    def __call__(self, *inputs: mx.array) -> mx.array:
        """Return `inner` of `inputs`, each `[rows, …]`: `[rows, …]`."""
        count = inputs[0].shape[0]
        outputs = [
            self._call([x[start:stop] for x in inputs], stop - start)
            for start, stop in cuts(count, self.rows)
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _call(self, inputs: list[mx.array], count: int) -> mx.array:
        missing = self.rows.low - count
        if missing <= 0:
            return self.inner(*inputs)
        padded = [mx.concatenate([x, mx.repeat(x[-1:], missing, axis=0)]) for x in inputs]
        return self.inner(*padded)[:count]


def cuts(count: int, rows: RowRange) -> list[tuple[int, int]]:
    """Return the start and the end of each call for `count` rows: as few calls as `rows.high` allows."""
    size = count if rows.high is None else min(rows.high, count)
    return [(start, min(start + size, count)) for start in range(0, count, max(1, size))]
