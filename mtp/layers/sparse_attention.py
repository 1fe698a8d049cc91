"""Attention to the blocks of tokens that an indexer scores highest, and the cache with the keys of these blocks.

A query sees the whole blocks up to its own token, reads the best of them, and all tokens after the last whole block.
Up to the budget it reads every token, and no block is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from operator import add
from typing import Any, NamedTuple, Self

import mlx.core as mx
import numpy as np

from mtp.device import this_device
from mtp.layers import block_choice
from mtp.layers.block_choice import SOURCES, Rows
from mtp.layers.kv_cache import PlainKV, Shape, tiled_attention
from mtp.layers.layer import KV_HEADS, CutAxis, Hole, Picks
from mtp.layers.source_kernel import SourceKernel
from proto.errors import ProtocolError


@dataclass(frozen=True)
class IndexerArgs:
    """The sizes of an indexer: a query reads `budget` tokens of blocks of `block` tokens."""

    heads: int
    head_dim: int
    budget: int
    block: int


Pool = Callable[[mx.array, int], mx.array]
"""The keys of blocks `[n, dim]`, of raw keys `[n x block, dim]` and the number of the first block."""


class IndexedKV(PlainKV):
    """Keys and values with the raw keys of the indexer, `[1, 1, room, dim]`, and the keys of whole blocks.

    A block's key depends on its tokens alone, so the keys of blocks that are whole after a trim stay.
    """

    cut_axes: tuple[CutAxis | None, ...] = (KV_HEADS, KV_HEADS, None)

    def __init__(self, block: int, index_dim: int | None = None) -> None:
        super().__init__()
        self.block, self.index_dim = block, index_dim
        self.index: mx.array | None = None
        self._blocks: mx.array | None = None

    def append_index(self, keys: mx.array) -> None:
        """Append the raw keys `[width, dim]` of the tokens that follow. Call it before `update_and_fetch`."""
        self.index = self._with_room(self.index, keys)
        self.index[0, 0, self.offset : self.offset + keys.shape[0]] = keys

    def _with_room(self, held: mx.array | None, rows: mx.array) -> mx.array:
        """Return `held [1, 1, room, dim]`, longer if it has no room for `rows [width, dim]`."""
        end = self.offset + rows.shape[0]
        if held is not None and end <= held.shape[2]:
            return held
        grown = mx.zeros((1, 1, -(-end // self.step) * self.step, rows.shape[1]), rows.dtype)
        if held is not None:
            grown[:, :, : self.offset] = held[:, :, : self.offset]
        return grown

    def block_keys(self, pool: Pool, hole: Hole | None = None) -> mx.array:
        """Return the keys of all whole blocks, fp32 `[n, dim]`. There is at least one.

        With a `hole` they are those of the text without it. The last blocks may then have tokens that the text lacks.
        """
        whole = self.offset // self.block
        sure = whole if hole is None else max(0, hole.end - hole.most) // self.block
        found = [self._keys_before(sure, pool)] if sure else []
        if hole is not None and sure < whole:
            assert self.index is not None, "it has the tokens of these blocks"
            places = hole.entries(mx.arange(sure * self.block, whole * self.block))
            raw = self.index.squeeze((0, 1))[mx.minimum(places, self.offset - 1)]
            found.append(pool(raw, sure).astype(mx.float32))
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _keys_before(self, whole: int, pool: Pool) -> mx.array:
        """Return the keys of the first `whole` blocks, and keep them."""
        known = 0 if self._blocks is None else min(whole, self._blocks.shape[0])
        if whole > known:
            assert self.index is not None, "it has the tokens of these blocks"
            new = pool(self.index[0, 0, known * self.block : whole * self.block], known)
            new = new.astype(mx.float32)  # as the scores, which read all of them for every token
            old = [] if self._blocks is None else [self._blocks[:known]]
            self._blocks = mx.concatenate([*old, new])
        assert self._blocks is not None, "there is a whole block"
        return self._blocks[:whole]

    def trim(self, n: int) -> int:
        trimmed = super().trim(n)
        if self._blocks is not None:
            self._blocks = self._blocks[: self.offset // self.block]
        return trimmed

    def arrays(self) -> list[mx.array]:
        blocks = [] if self._blocks is None else [self._blocks]
        return [] if self.index is None else [*super().arrays(), self.index, *blocks]

    def _parts(self, start: int = 0) -> list[mx.array]:
        assert self.index is not None, "there are tokens"
        return [*super()._parts(start), self.index[:, :, start : self.offset]]

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        if len(parts) != len(self.cut_axes):
            raise ProtocolError(f"{len(parts)} arrays of keys, values and the index, expected {len(self.cut_axes)}")
        super()._set_parts((parts[0], parts[-2]))
        self.index = parts[-1]

    def _empty(self) -> Self:
        return type(self)(self.block, self.index_dim)

    def _row_shapes(self, heads: int, dim: int) -> list[Shape]:
        return [(heads, dim), (heads, dim), (1, self.index_dim)]


class LatentKV(IndexedKV):
    """Latents `[1, 1, room, rank]`, each the key and the value of a token for all heads, with the index beside them."""

    cut_axes = (None, None)

    def append(self, latents: mx.array) -> mx.array:
        """Append `latents [width, rank]`, and return all of them as `[1, 1, tokens, rank]`."""
        held = self._with_room(self.keys, latents)
        end = self.offset + latents.shape[0]
        held[0, 0, self.offset : end] = latents
        self.keys = self.values = held
        self.offset = end
        return held[:, :, :end]

    def arrays(self) -> list[mx.array]:
        return super().arrays()[1:]

    def _parts(self, start: int = 0) -> list[mx.array]:
        return super()._parts(start)[1:]

    def _row_shapes(self, heads: int, dim: int) -> list[Shape]:
        return super()._row_shapes(heads, dim)[1:]


TILE_BYTES = 2**28
"""Bytes. Bound of the keys and values that are gathered for some queries at once. MLX may copy them for each head."""


def chosen_blocks(
    queries: mx.array, blocks: mx.array, whole: mx.array, count: int, weights: mx.array | None = None
) -> mx.array:
    """Return the `count` blocks with the highest scores for each query, in their order: `[w, count]`.

    `queries` are `[w, heads, dim]`, `blocks` fp32 `[n, dim]`, and query i sees the first `whole[i]` blocks. Of equal
    scores, the first blocks are chosen. A query that sees fewer blocks gets further ones after its own. `weights
    [w, heads]` are those of the heads in a score, 1 without them; they may be negative.
    """
    products = queries.astype(mx.float32) @ blocks.T
    heads = mx.split(products, products.shape[1], axis=1)
    seen = mx.arange(blocks.shape[0]), whole[:, None, None]
    if weights is None:
        ranks = _ranks(heads, *seen)
    else:
        ranks = _weighted_ranks(heads, mx.split(weights.astype(mx.float32)[..., None], len(heads), axis=1), *seen)
    return block_choice.lowest(None, ranks.squeeze(1), count)


@partial(mx.compile, shapeless=True)
def _ranks(heads: Any, numbers: mx.array, whole: mx.array) -> mx.array:
    """Return the negative scores of blocks, and infinity for those that a query does not see. MLX's sort is stable."""
    scores = reduce(add, (mx.maximum(products, 0) for products in heads))
    return mx.where(numbers < whole, -scores, mx.inf)


@partial(mx.compile, shapeless=True)
def _weighted_ranks(heads: Any, weights: Any, numbers: mx.array, whole: mx.array) -> mx.array:
    """Return `_ranks` of scores in which each head has a weight."""
    pairs = zip(heads, weights, strict=True)
    scores = reduce(add, (mx.maximum(products, 0) * weight for products, weight in pairs))
    return mx.where(numbers < whole, -scores, mx.inf)


Language = type[SourceKernel] | None
"""The language of the kernels that choose blocks. None is MLX's operations."""


class SparseReads(NamedTuple):
    """The inputs of `sparse_attention`: `q [1, heads, w, dim]` at `offset`, and what it reads.

    `keys` and `values` are `[1, kv_heads, tokens, dim]`, and `index_queries [w, heads, dim]`. `blocks [n, dim]` are the
    keys of the whole blocks. `weights` are those of `chosen_blocks`. With a `hole` there is one query.
    """

    q: mx.array
    keys: mx.array
    values: mx.array
    index_queries: mx.array
    blocks: mx.array
    offset: int
    args: IndexerArgs
    scale: float
    weights: mx.array | None = None
    hole: Hole | None = None
    language: Language = None

    @property
    def most(self) -> int:
        """Blocks that a query reads."""
        return min(self.args.budget // self.args.block, int(self.blocks.shape[0]))

    def chosen(self, own: slice) -> mx.array:
        """Return the blocks that each of the queries `own` reads, in their order: `[w, count]`."""
        queries, weights = self.index_queries[own], None if self.weights is None else self.weights[own]
        if self.language is None:
            return chosen_blocks(queries, self.blocks, self._whole(own), self.most, weights)
        wide = None if weights is None else weights.astype(mx.float32)
        products = queries.astype(mx.float32) @ self.blocks.T
        ranks = block_choice.ranks_of(self.language, products, wide, self._rows(own))
        return block_choice.lowest(self.language, ranks, self.most)

    def tokens(self, own: slice) -> tuple[mx.array, mx.array]:
        """Return the entries of the cache that the queries `own` read, and which of them they see: `[w, any]`.

        They are the tokens of the chosen blocks, and those after the last whole block.
        """
        chosen = self.chosen(own)
        if self.language is not None:
            return block_choice.tokens_of(self.language, chosen, self._rows(own))
        inner = mx.array(np.arange(self.args.block), mx.uint32)
        tokens = (chosen[..., None] * self.args.block + inner).reshape(chosen.shape[0], -1)
        newest, seen = _seen(self, own)
        tokens = mx.concatenate([tokens, newest], axis=1)
        if self.hole is not None:
            tokens = mx.minimum(self.hole.entries(tokens), self.keys.shape[2] - 1)
        return tokens, seen

    def _whole(self, own: slice) -> mx.array:
        """Return the number of whole blocks that each of the queries sees: int32 `[w]`."""
        places: Any = np.arange(self.offset + own.start, self.offset + own.stop)
        if self.hole is not None:  # only the device knows the place
            places = mx.array(places) - self.hole.count
        return mx.array((places + 1) // self.args.block, mx.int32)

    def _rows(self, own: slice) -> Rows:
        hole, newest = self.hole, int(self.keys.shape[2]) - 1
        numbers = _numbers(self.offset + own.start, newest + 1 if hole is None else hole.end, newest)
        return Rows(numbers, _numbers(0) if hole is None else hole.count, self.args.block)


@lru_cache(maxsize=64)
def _numbers(*numbers: int) -> mx.array:
    """Return an array of some numbers, which all layers of a frame share."""
    return mx.array(numbers, mx.int32)


def full_attention(
    q: mx.array, keys: mx.array, values: mx.array, offset: int, scale: float, hole: Hole | None
) -> mx.array:
    """Return the attention of the queries, or of one behind a `hole`, to all tokens, which are within the budget."""
    if hole is None:
        return tiled_attention(q, keys, values, offset, scale)
    mask = hole.visible(keys.shape[2])[None, None, None]
    out: mx.array = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
    return out


def sparse_attention(reads: SparseReads) -> mx.array:
    """Return the attention of the queries to the blocks that score highest, and to the newest tokens."""
    if reads.q.shape[2] > GATHERED_ROWS and reads.keys.shape[2] <= this_device().masked_keys:
        return masked_attention(reads)
    return gathered_attention(reads)


GATHERED_ROWS = 32
"""Rows of a window, which gather their own keys everywhere, so that a row's result depends on no other row."""

SCORE_BYTES = 2**29
"""Bytes. Bound of the scores of some queries and all keys. On an H200 512 queries at once are as fast as 2,048."""


def masked_attention(reads: SparseReads) -> mx.array:
    """Return `sparse_attention` as one of all keys, most of which are masked."""
    q, keys, values, _, blocks, offset, args, scale, *_ = reads
    tile = max(1, SCORE_BYTES // (q.shape[1] * keys.shape[2] * q.itemsize))
    outputs = []
    for start in range(0, q.shape[2], tile):
        own = slice(start, min(start + tile, q.shape[2]))
        seen, rows = offset + own.stop, own.stop - own.start
        places = mx.arange(offset + own.start, seen)[:, None]
        whole = (places + 1) // args.block
        chosen = reads.chosen(own)
        # With room for blocks behind a query's own, which the mask hides, and for the newest tokens.
        picked = mx.zeros((rows, blocks.shape[0] + 1), mx.bool_)
        picked = mx.put_along_axis(picked, chosen, mx.array(True), axis=1)
        tokens = mx.arange(seen)
        inside = mx.repeat(picked, args.block, axis=1)[:, :seen]
        mask = mx.where(tokens < whole * args.block, inside, tokens <= places)
        k, v = keys[:, :, :seen], values[:, :, :seen]
        found = mx.fast.scaled_dot_product_attention(q[:, :, own], k, v, scale=scale, mask=mask)
        outputs.append(found)
        if own.stop < q.shape[2]:
            mx.eval(found)  # one tile at a time is in memory
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def gathered_attention(reads: SparseReads) -> mx.array:
    """Return `sparse_attention` with the keys that each query reads next to each other."""
    q, keys, values, args, scale = reads.q, reads.keys, reads.values, reads.args, reads.scale
    read = reads.most * args.block + args.block - 1
    row = 2 * keys.shape[1] * keys.shape[3] * keys.itemsize
    tile = max(1, TILE_BYTES // (read * row))
    # An index in place of `squeeze` would copy the whole cache.
    held = [part.squeeze(0).transpose(1, 0, 2) for part in (keys, values)]
    outputs = []
    for start in range(0, q.shape[2], tile):
        own = slice(start, min(start + tile, q.shape[2]))
        rows = own.stop - own.start
        tokens, seen = reads.tokens(own)
        k = held[0][tokens].transpose(0, 2, 1, 3)
        v = k if values is keys else held[1][tokens].transpose(0, 2, 1, 3)
        # The heads that share keys are the rows of one product, which reads the keys once for all of them.
        heads = q[0:1, :, own].reshape(keys.shape[1], -1, rows, q.shape[3])
        found = mx.fast.scaled_dot_product_attention(
            heads.transpose(2, 0, 1, 3), k, v, scale=scale, mask=seen[:, None, None]
        )
        outputs.append(found.reshape(rows, -1, q.shape[3]).transpose(1, 0, 2)[None])
        if own.stop < q.shape[2]:
            mx.eval(outputs[-1])  # one tile at a time is in memory
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _seen(reads: SparseReads, own: slice) -> tuple[mx.array, mx.array]:
    """Return the tokens `[w, block - 1]` after the whole blocks of the queries `own`, and a mask.

    The mask is that of the tokens of the chosen blocks and of the newest ones. The blocks that a query sees are the
    first of those chosen for it.
    """
    block, hole = reads.args.block, reads.hole
    join: Any = np.concatenate
    places: Any = np.arange(reads.offset + own.start, reads.offset + own.stop)[:, None]
    inner: Any = np.arange(reads.most * block)
    after: Any = np.arange(block - 1)
    if hole is not None:  # only the device knows the place
        places, inner, after, join = mx.array(places) - hole.count, mx.array(inner), mx.array(after), mx.concatenate
    whole = (places + 1) // block
    newest = whole * block + after
    mask = mx.array(join([inner < whole * block, newest <= places], axis=1))
    if hole is None:
        newest = np.minimum(newest, reads.keys.shape[2] - 1)
    return mx.array(newest, mx.uint32), mask


TRIED_TOKENS = 32_768
"""Tokens of the trial of the kernels."""


class BlockReader:
    """A mixer that reads the blocks which an indexer chooses by `sizes`."""

    sizes: IndexerArgs
    language: Language = None

    def take_kernels(self, language: type[SourceKernel], picks: Picks) -> None:
        """Let kernels in `language` choose the blocks if `picks` allows it."""
        args = replace(self.sizes, heads=1)

        def mark_in(language: Language) -> Callable[[mx.array], mx.array]:
            """Return a function that marks the tokens which rows of products read."""

            def mark(x: mx.array) -> mx.array:
                w = x.shape[0]
                blocks, queries = x[:, :: args.block].T.astype(mx.float32), mx.eye(w)[:, None]
                keys, offset = x[None, None].swapaxes(2, 3), TRIED_TOKENS - args.block - w
                reads = SparseReads(x, keys, keys, queries, blocks, offset, args, 1.0)
                tokens, seen = reads._replace(language=language).tokens(slice(0, w))
                return mx.put_along_axis(mx.zeros_like(x), tokens, seen.astype(x.dtype), axis=1)

            return mark

        shapes = f"{args.budget // args.block} blocks of {args.block}"
        own, replaced = mark_in(language), mark_in(None)
        self.language = language if picks("block_choice", shapes, SOURCES, TRIED_TOKENS, own, replaced) else None
