"""Qwen Sparse Attention: every query reads the blocks of tokens that the indexer scores highest, and the newest tokens.

A query sees all whole blocks up to its own token, and the tokens after them. It reads at most `budget` tokens of
blocks. Up to there the attention is the usual one, and no block is scored.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mtp.flash_next.args import IndexerArgs

TILE_BYTES = 2**28
"""Bytes. Bound of the keys and values that are gathered for some queries at once. MLX may copy them for each head."""


def reads_everything(args: IndexerArgs, tokens: int) -> bool:
    """Return whether the last of `tokens` tokens reads all of them."""
    return tokens // args.block <= args.budget // args.block


def chosen_blocks(queries: mx.array, blocks: mx.array, whole: mx.array, count: int) -> mx.array:
    """Return the `count` blocks with the highest scores for each query, in their order: int32 `[w, count]`.

    `queries` are `[w, heads, dim]`, `blocks` `[n, dim]`, and query i sees the first `whole[i]` blocks. Of blocks with
    equal scores, the first ones are chosen. A query that sees fewer blocks gets further ones, which the caller masks.
    """
    scores = mx.maximum(queries.astype(mx.float32) @ blocks.astype(mx.float32).T, 0).sum(axis=1)
    numbers = mx.arange(blocks.shape[0])
    scores = mx.where(numbers < whole[:, None], scores, -1.0)
    least = mx.sort(scores, axis=-1)[:, -count][:, None]
    above, equal = scores > least, scores == least
    missing = count - above.sum(axis=-1, keepdims=True)
    taken = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= missing))
    return mx.sort(mx.where(taken, numbers, blocks.shape[0]), axis=-1)[:, :count]


def sparse_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    index_queries: mx.array,
    blocks: mx.array,
    offset: int,
    args: IndexerArgs,
    scale: float,
) -> mx.array:
    """Return the attention of `q [1, heads, w, dim]` at `offset` to `keys` and `values [1, kv_heads, tokens, dim]`.

    `index_queries` are `[w, heads, dim]`, and `blocks [n, dim]` the keys of the whole blocks.
    """
    count = min(args.budget // args.block, blocks.shape[0])
    read = count * args.block + args.block - 1
    row = 2 * keys.shape[1] * keys.shape[3] * keys.itemsize
    tile = max(1, TILE_BYTES // (read * row))
    outputs = []
    for start in range(0, q.shape[2], tile):
        own = slice(start, min(start + tile, q.shape[2]))
        places = np.arange(offset + own.start, offset + own.stop)
        whole = mx.array((places + 1) // args.block, mx.int32)
        chosen = chosen_blocks(index_queries[own], blocks, whole, count)
        inner = (chosen[..., None] * args.block + mx.arange(args.block)).reshape(len(places), -1)
        newest = whole[:, None] * args.block + mx.arange(args.block - 1)
        visible = [
            mx.repeat(chosen < whole[:, None], args.block, axis=1),
            newest <= mx.array(places, mx.int32)[:, None],
        ]
        tokens = mx.minimum(mx.concatenate([inner, newest], axis=1), keys.shape[2] - 1)
        k, v = (held[0].transpose(1, 0, 2)[tokens].transpose(0, 2, 1, 3) for held in (keys, values))
        mask = mx.concatenate(visible, axis=1)[:, None, None]
        # The heads that share keys are the rows of one product, which reads the keys once for all of them.
        heads = q[0, :, own].reshape(keys.shape[1], -1, len(places), q.shape[3])
        found = mx.fast.scaled_dot_product_attention(
            heads.transpose(2, 0, 1, 3), k, v, scale=scale, mask=mask
        )
        outputs.append(found.reshape(len(places), -1, q.shape[3]).transpose(1, 0, 2)[None])
        if own.stop < q.shape[2]:
            mx.eval(outputs[-1])  # one tile at a time is in memory
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
