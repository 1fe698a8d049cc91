"""The choice of the lowest ranks of each row, in one launch on a GPU, the same text for NVIDIA and Apple."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from mtp.layers.source_kernel import THREADS, SourceKernel

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


@cache
def _kernel(language: type[SourceKernel]) -> SourceKernel:
    return language("block_choice", ["ranks"], ["chosen"], CHOICE_SOURCE)


def lowest(language: type[SourceKernel] | None, ranks: mx.array, count: int) -> mx.array:
    """Return the columns of the `count` lowest of `ranks [rows, n]` in fp32, in their order: `[rows, count]`.

    Of equal ranks, the first columns are chosen. A row has at least `count` columns, and no NaN. Without a `language`
    two sorts choose, which MLX has made stable.
    """
    if language is None:
        return mx.sort(mx.argsort(ranks, axis=-1)[:, :count], axis=-1)
    (chosen,) = _kernel(language)(
        [ranks],
        blocks=(ranks.shape[0], 1, 1),
        threads=THREADS,
        template=[("COUNT", count)],
        shapes=[(ranks.shape[0], count)],
        dtypes=[mx.uint32],
    )
    return chosen
