"""Attention in tiles of queries is the attention of all queries, with less memory for scores."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mtp.layers import kv_cache as module
from mtp.layers.kv_cache import tiled_attention

HEADS, DIM, WIDTH = 4, 32, 37
OFFSETS = (0, 11)


def tensors(offset: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, and keys and values with room behind the last query."""
    shapes = (
        (1, HEADS, WIDTH, DIM),
        (1, 2, offset + WIDTH + 5, DIM),
        (1, 2, offset + WIDTH + 5, DIM),
    )
    found = [mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes)]
    return found[0], found[1], found[2]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("tile", [1, 2, 8, 36, 37])
def test_tiles_give_the_result_of_the_whole(
    offset: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile size gives the causal attention of all queries."""
    q, k, v = tensors(offset)
    end = offset + WIDTH
    whole = mx.fast.scaled_dot_product_attention(
        q, k[:, :, :end], v[:, :, :end], scale=DIM**-0.5, mask="causal"
    )
    monkeypatch.setattr(module, "SCORE_BYTES", tile * HEADS * end * q.itemsize)
    found = tiled_attention(q, k, v, offset, DIM**-0.5)
    assert mx.allclose(found, whole, atol=1e-5).item()


def test_the_scores_of_a_tile_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call sees more queries than the bound of the scores allows, and a row of any length is computed."""
    seen: list[tuple[int, int]] = []
    attend = mx.fast.scaled_dot_product_attention

    def record(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
        """Note the queries and the keys of a call."""
        seen.append((q.shape[2], k.shape[2]))
        return attend(q, k, v, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    q, k, v = tensors(11)
    monkeypatch.setattr(module, "SCORE_BYTES", 2000)
    tiled_attention(q, k, v, 11, 1.0)
    assert sum(queries for queries, _ in seen) == WIDTH
    assert all(queries == 1 or HEADS * queries * keys * 4 <= 2000 for queries, keys in seen)
    assert [keys for _, keys in seen][-1] == 11 + WIDTH
