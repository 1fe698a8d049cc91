"""Attention in tiles of queries, and around rejected rows, is the attention of all queries to the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mtp.device import DEVICES
from mtp.layers import kv_cache as module
from mtp.layers.kv_cache import new_kv, tiled_attention
from mtp.layers.layer import Hole, KVFormat
from mtp.layers.sparse_attention import IndexerArgs, LatentKV, SparseReads, full_attention, gathered_attention

HEADS, DIM, WIDTH = 4, 32, 37
OFFSETS = (0, 11)


def tensors(offset: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, and keys and values with room behind the last query."""
    held = (1, 2, offset + WIDTH + 5, DIM)
    shapes = (1, HEADS, WIDTH, DIM), held, held
    found = [mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes)]
    return found[0], found[1], found[2]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("tile", [1, 2, 8, 36, 37])
def test_tiles_give_the_result_of_the_whole(offset: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile size gives the causal attention of all queries."""
    q, k, v = tensors(offset)
    end = offset + WIDTH
    whole = mx.fast.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], scale=DIM**-0.5, mask="causal")
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


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_keys_and_values_are_plain_on_cuda(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CUDA products refuse parts of a buffer. The attention is that of other devices, and so is what is kept."""
    results, hole = [], Hole(20, mx.array(3), 3)
    for backend in ("cpu", "cuda"):
        device = replace(DEVICES["cpu"], backend=backend)
        monkeypatch.setattr(module, "this_device", lambda device=device: device)
        cache = new_kv(KVFormat.of(DIM, bits))
        q, k, v = (part[:, :, :WIDTH] for part in tensors(0))
        results.append([cache.attend(q, k, v, 1.0, None)])
        q, k, v = (part[:, :, :1] for part in (q, k, v))
        results[-1] += [cache.attend_around(q, k, v, 1.0, hole), *cache.arrays()]
        assert isinstance(cache.update_and_fetch(k, v)[0], mx.array) is (backend == "cuda")
    assert all(mx.allclose(a, b, atol=1e-5).item() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("length", [33, 61, 62, 63, 64, 65])
@pytest.mark.parametrize(("rows", "rejected"), [(0, 0), (3, 0), (3, 2), (9, 5), (9, 9)])
def test_a_query_behind_a_hole_reads_what_it_reads_without_it(length: int, rows: int, rejected: int) -> None:
    """Rejected rows in the cache change neither the blocks nor the tokens that a chain of drafts reads after them."""
    args, budget = IndexerArgs(4, 16, 32, 4), 32 // 4
    text, wrong = (mx.random.normal((length + rows + 3, 16), key=mx.random.key(i)) for i in range(2))
    queries = mx.random.normal((3, 4, 16), key=mx.random.key(2))
    found = []
    for own in (0, rejected):
        cache = LatentKV(4, 16).with_rows(1, 16)
        end = length + rows - rejected
        kept = mx.concatenate([text[:end], wrong[:own]])
        cache.append_index(kept)
        cache.append(kept)
        hole = Hole(cache.offset, mx.array([own]), rows) if own else None
        cache.block_keys(_mean)
        outputs = []
        for step in range(3):
            row, asked = text[end + step : end + step + 1], queries[step : step + 1]
            offset = cache.offset
            cache.append_index(row)
            held = cache.append(row)
            if cache.offset // 4 <= budget:
                outputs.append(full_attention(asked.transpose(1, 0, 2)[None], held, held, offset, 0.25, hole))
            else:
                blocks = cache.block_keys(_mean, hole)
                reads = SparseReads(asked.transpose(1, 0, 2)[None], held, held, asked, blocks, offset, args, 0.25)
                outputs.append(gathered_attention(reads._replace(hole=hole)))
        found.append(mx.concatenate(outputs))
    assert mx.allclose(found[0], found[1], atol=1e-6)


def _mean(raw: mx.array, first: int) -> mx.array:
    """Return keys of blocks that depend on their number too."""
    return raw.reshape(-1, 4, 16).mean(axis=1) * (1 + mx.arange(first, first + raw.shape[0] // 4))[:, None]
