"""Rows that an attention layer computes behind rejected rows, and behind the accepted rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mtp.layers.layer import Hole, KVFormat
from proto.images import ImageLayout, ImageSpan

LENGTH = 62
"""Rows before. Those behind them are in the next split of the keys."""

LAYOUT = ImageLayout((ImageSpan(3, 4, 5),), (11, 11, 10))
"""An image among the rows before."""


def rows_behind_a_hole(attention: Any, count: int, sequences: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield what the layer adds to two rows of each of `sequences`, behind LENGTH rows of which `count` are rejected.

    The second array of a pair is the same behind the accepted rows alone.
    """
    width = attention.norm.weight.shape[0]
    x = mx.random.normal((LENGTH, width), key=mx.random.key(1)).astype(mx.bfloat16)
    row = mx.random.normal((1, width), key=mx.random.key(2)).astype(mx.bfloat16)
    holed = [attention.new_cache(KVFormat()) for _ in range(sequences)]
    plain = attention.new_cache(KVFormat())
    for cache in (*holed, plain):
        cache.layout = LAYOUT
    for cache in holed:
        attention.forward(x, [cache], [LENGTH])
    attention.forward(x[: LENGTH - count], [plain], [LENGTH - count])
    holes = [Hole(LENGTH, mx.array([count]), count) for _ in holed]
    for _ in range(2):
        rows = mx.concatenate([row] * sequences)
        found = attention.forward(rows, holed, [1] * sequences, holes=holes) - rows
        expected = attention.forward(row, [plain], [1]) - row
        for i in range(sequences):
            yield found[i : i + 1], expected
