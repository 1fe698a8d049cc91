"""Causal attention in tiles of queries, for backends that hold all scores at once."""

from __future__ import annotations

import mlx.core as mx

from mtp.kernels.cuda import backend

SCORE_BYTES = 128 * 2**20
"""Bytes. Bound of the scores of one tile. MLX's fused kernels for heads of 256 take few queries; for more it holds
the scores of all of them: 3.2 GB for 512 queries of a 27B model at 128,000 keys."""


def tiled_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    offset: int,
    scale: float,
    queries: int | None = None,
) -> mx.array:
    """Return the causal attention of `q [1, heads, width, dim]` at `offset`, in tiles of queries.

    Where MLX has no fused kernel it holds the scores of all queries at once; a tile's stay below `SCORE_BYTES`.
    A tile has at most `queries` queries, where given. The same keys then get the same kernel in any cache.
    """
    heads, width = q.shape[1:3]
    if queries is not None and backend() == "cuda":
        keys, values = _token_major(keys), _token_major(values)
    end = offset + width
    tile = max(1, SCORE_BYTES // (heads * end * q.itemsize))
    tile = tile if queries is None else min(tile, queries)
    outputs = []
    for start in range(0, width, tile):
        stop = min(start + tile, width)
        seen = offset + stop
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                q[:, :, start:stop],
                keys[:, :, :seen],
                values[:, :, :seen],
                scale=scale,
                mask="causal" if stop - start > 1 else None,
            )
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _token_major(held: mx.array) -> mx.array:
    """Return `held [1, heads, tokens, dim]` with the heads of a token next to each other in memory.

    For one query, MLX's CUDA backend takes cuDNN if 256 keys or more are a slice of a buffer for a multiple of 256
    tokens. Otherwise it takes its own kernel. The buffer depends on the sequence's history. This layout is never such
    a slice.
    """
    return mx.contiguous(held.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
