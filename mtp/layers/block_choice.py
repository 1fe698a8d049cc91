"""The kernels that choose the blocks of tokens which sparse attention reads, the same text for NVIDIA and Apple.

Three launches rank all blocks, choose the best ones, and list their tokens. MLX's operations are some hundred for 32
heads, which take the host longer than the GPU.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mtp.layers.source_kernel import THREADS, SourceKernel

PLACE = """
  // A row's query is at a place of the text, which lacks the rows that are rejected. It sees the whole blocks before.
  const int row = blockIdx.y, column = blockIdx.x * 256 + threadIdx.x;
  const int place = numbers[0] + row - removed[0], whole = (place + 1) / BLOCK;
"""
"""The start of two kernels whose blocks of threads have 256 columns of a row."""

RANK_SOURCE = (
    PLACE
    + r"""
  const int columns = products_shape[2];
  if (column >= columns) return;
  float score = 0.0f;
  for (int head = 0; head < HEADS; ++head) {
    float product = products[(($int64)row * HEADS + head) * columns + column];
    product = product > 0.0f ? product : 0.0f;
    score += WEIGHTED ? __fmul_rn(product, weights[row * HEADS + head]) : product;
  }
  ranks[($int64)row * columns + column] = column < whole ? -score : __uint_as_float(0x7f800000);
"""
)

TOKEN_SOURCE = (
    PLACE
    + r"""
  const int chosen_tokens = COUNT * BLOCK, all = chosen_tokens + BLOCK - 1;
  if (column >= all) return;
  int token = whole * BLOCK + column - chosen_tokens;
  bool sees = token <= place;
  if (column < chosen_tokens) {
    token = (int)chosen[row * COUNT + column / BLOCK] * BLOCK + column % BLOCK;
    sees = column < whole * BLOCK;
  }
  // The rejected rows are still in the cache.
  token = token < numbers[1] - removed[0] ? token : token + removed[0];
  tokens[($int64)row * all + column] = token < numbers[2] ? token : numbers[2];
  seen[($int64)row * all + column] = sees;
"""
)

CHOICE_SOURCE = r"""
  // A block of threads reads a row. It finds the bits of the last rank that is chosen, eight at a time from the
  // highest on, and how many of the ranks equal to it are chosen. Then every thread writes those of its own columns.
  const int tid = threadIdx.x, columns = ranks_shape[1];
  const $int64 start = ($int64)blockIdx.x * columns;
  $array int counts[256];
  $array int sums[512];
  $array int found[2];
  // Integers in the order of the ranks; both zeros are equal.
  auto key_of = [&](int column) {
    unsigned bits = __float_as_uint(ranks[start + column]);
    bits = bits << 1 ? bits : 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  };
  unsigned last = 0;
  int left = COUNT;
  for (int shift = 24; shift >= 0; shift -= 8) {
    counts[tid] = 0;
    __syncthreads();
    for (int column = tid; column < columns; column += 256) {
      const unsigned key = key_of(column);
      if (shift == 24 || key >> (shift + 8) == last) atomicAdd(&counts[(key >> shift) & 255], 1);
    }
    __syncthreads();
    for (int step = 1; step < 256; step *= 2) {
      const int before = tid < step ? 0 : counts[tid - step];
      __syncthreads();
      counts[tid] += before;
      __syncthreads();
    }
    const int before = tid ? counts[tid - 1] : 0;
    if (before < left && left <= counts[tid]) {
      found[0] = tid;
      found[1] = left - before;
    }
    __syncthreads();
    last = last << 8 | (unsigned)found[0];
    left = found[1];
  }
  const int share = (columns + 255) / 256, first = tid * share;
  const int end = first + share < columns ? first + share : columns;
  int lower = 0, equal = 0;
  for (int column = first; column < end; ++column) {
    const unsigned key = key_of(column);
    lower += key < last;
    equal += key == last;
  }
  sums[tid] = lower;
  sums[256 + tid] = equal;
  __syncthreads();
  for (int step = 1; step < 256; step *= 2) {
    const int before = tid < step ? 0 : sums[tid - step], same = tid < step ? 0 : sums[256 + tid - step];
    __syncthreads();
    sums[tid] += before;
    sums[256 + tid] += same;
    __syncthreads();
  }
  lower = sums[tid] - lower;
  equal = sums[256 + tid] - equal;
  for (int column = first; column < end; ++column) {
    const unsigned key = key_of(column);
    const int place = lower + (equal < left ? equal : left);
    if (key < last || (key == last && equal < left)) chosen[($int64)blockIdx.x * COUNT + place] = column;
    lower += key < last;
    equal += key == last;
  }
"""


SOURCES = RANK_SOURCE + CHOICE_SOURCE + TOKEN_SOURCE


@cache
def _kernels(language: type[SourceKernel]) -> tuple[SourceKernel, SourceKernel, SourceKernel]:
    return (
        language("block_ranks", ["products", "weights", "numbers", "removed"], ["ranks"], RANK_SOURCE),
        language("block_choice", ["ranks"], ["chosen"], CHOICE_SOURCE),
        language("block_tokens", ["chosen", "numbers", "removed"], ["tokens", "seen"], TOKEN_SOURCE),
    )


class Rows(NamedTuple):
    """The places of the queries of some rows, which follow each other.

    `numbers` are that of the first one, the end of the rejected rows, and the newest entry of the cache, int32 `[3]`.
    `removed` is the number of rejected rows, int32 `[1]`, lazy.
    """

    numbers: mx.array
    removed: mx.array
    block: int


def ranks_of(language: type[SourceKernel], products: mx.array, weights: mx.array | None, rows: Rows) -> mx.array:
    """Return the ranks of blocks, the best one lowest: fp32 `[w, n]`, infinite for blocks that a query does not see.

    `products [w, heads, n]` are those of queries and blocks, and `weights [w, heads]` those of the heads, 1 without
    them. Both are fp32.
    """
    w, heads, columns = products.shape
    (ranks,) = _kernels(language)[0](
        [products, products if weights is None else weights, rows.numbers, rows.removed],
        blocks=(-(-columns // THREADS), w, 1),
        template=[("HEADS", heads), ("BLOCK", rows.block), ("WEIGHTED", weights is not None)],
        shapes=[(w, columns)],
        dtypes=[mx.float32],
    )
    return ranks


def lowest(language: type[SourceKernel] | None, ranks: mx.array, count: int) -> mx.array:
    """Return the columns of the `count` lowest of `ranks [rows, n]` in fp32, in their order: `[rows, count]`.

    Of equal ranks, the first columns are chosen. A row has at least `count` columns, and no NaN. Without a `language`
    two sorts choose, which MLX has made stable.
    """
    if language is None:
        return mx.sort(mx.argsort(ranks, axis=-1)[:, :count], axis=-1)
    (chosen,) = _kernels(language)[1](
        [ranks],
        blocks=(ranks.shape[0], 1, 1),
        template=[("COUNT", count)],
        shapes=[(ranks.shape[0], count)],
        dtypes=[mx.uint32],
    )
    return chosen


def tokens_of(language: type[SourceKernel], chosen: mx.array, rows: Rows) -> tuple[mx.array, mx.array]:
    """Return the entries of the cache that queries read, uint32 `[w, any]`, and which of them they see.

    They are the tokens of the `chosen [w, count]` blocks, and those after the last whole block.
    """
    w, count = chosen.shape
    read = count * rows.block + rows.block - 1
    tokens, seen = _kernels(language)[2](
        [chosen, rows.numbers, rows.removed],
        blocks=(-(-read // THREADS), w, 1),
        template=[("COUNT", count), ("BLOCK", rows.block)],
        shapes=[(w, read)] * 2,
        dtypes=[mx.uint32, mx.bool_],
    )
    return tokens, seen
