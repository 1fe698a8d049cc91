"""Gated attention of single rows on an NVIDIA GPU: norms and RoPE in one launch, attention of up to 8 sequences in two.

MLX has no fused attention for heads of 256 there. A row attends to the keys before it and to its own, in splits of 64
keys from the first key on. So its result does not depend on the rows and sequences that run with it.

A kernel writes keys and values into the memory of their cache. MLX copies an array before it changes a part of it, if
unfinished work reads the array: a step that begins before the one before it has ended would copy whole caches. The
kernel takes the array as an input, and writes behind the tokens that anybody reads. MLX does not see that. So the
kernel has a result of its own, `written`: everything in its graph that reads these rows depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from mtp.layers.cuda.packed_linear import FEW_ROWS, HEADER
from mtp.layers.kv_cache import PairKV
from mtp.layers.prepare_rows import HEAD_DIM, AttentionShape, prepare_kernel, run_prepare
from mtp.layers.source_kernel import CudaKernel

MOST_GROUPED = 16
"""Query heads of a K/V head, over all rows of a block: the rows of a tensor core's product."""

SPLIT = 64
BLOCKS = 2 * 132
"""Blocks that run at once on an H200. With more splits, each computes several."""

SLOTS = 8
"""Sequences of one launch: each has a K/V array of its own, which is an argument of the kernel."""


class RowArrays(NamedTuple):
    """The places of the rows of a launch, in int32 arrays.

    `places [rows, 2]` has slot and position of each row. `caps [SLOTS]` has the lengths of the K/V arrays of the slots.
    `spans [rows, 3]` has the last entry that a row sees, its own, and begin and end of a range that it does not see.
    `written [1]` is computed before the rows attend.
    """

    places: mx.array
    spans: mx.array
    caps: mx.array
    written: mx.array


_BOUNDED = """
// Two blocks share a multiprocessor. MLX writes the kernel's declaration, and has no argument for its bounds.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(256, 2)
"""

_ATTEND_SOURCE = r"""
  // One block: ROWS neighbouring query rows, one K/V head, every gridDim.y-th split of SPLIT keys. Rows of one sequence
  // run together. Tensor cores multiply all their heads with the keys warp, warp + 8, ... of a warp. For the values a
  // warp has 32 elements of D, and half a warp every other key. No row's bits depend on the rows beside it. While a
  // split is computed, the loads of the next one are under way.
  constexpr int SPLIT = 64, WARPS = 8, STEPS = D / 32, ALL = ROWS * GQA, PADDED = ALL <= 8 ? 8 : 16;
  constexpr int EARLY = ALL <= 8 ? STEPS : STEPS / 2;  // more would take too many registers for two blocks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = lane >> 2, part = lane & 3;
  const int half = lane >> 4, d = 32 * warp + 2 * (lane & 15), own = warp + WARPS * column;
  const int heads = gridDim.z * GQA;
  int splits = 0;
  for (int i = 0; i < caps_shape[0]; ++i) splits = max(splits, (caps[i] + SPLIT - 1) / SPLIT);
  const InT* const table[] = {PAIRS};
  __shared__ __align__(16) float scores[SPLIT][PADDED];
  const int end = min((int)(blockIdx.x + 1) * ROWS, (int)places_shape[0]);
  for (int row = blockIdx.x * ROWS, together = 0; row < end; row += together) {
    const int slot = places[2 * row];
    int length = 0;
    for (together = 0; row + together < end && places[2 * (row + together)] == slot; ++together)
      length = max(length, spans[3 * (row + together)] + 1);
    const int count = together * GQA;
    // The place of a row's head in `q`, without D.
    auto of = [&](int m) { return (long long)(row + m / GQA) * heads + blockIdx.z * GQA + m % GQA; };
    const long long head_size = (long long)caps[slot] * D;
    const InT* k_ = table[slot] + blockIdx.z * head_size + own * D + 8 * part;
    const InT* v_ = table[slot] + (gridDim.z + blockIdx.z) * head_size + half * D + d;
    const InT* low_ = q + of(column) * D + 8 * part;
    const InT* high_ = q + of(column + 8) * D + 8 * part;
    // The fragments of queries and keys have the elements in one order.
    uint4 keys[STEPS];
    unsigned values[SPLIT / 2];
    auto load_keys = [&](int begin, int first, int last) {
      const InT* from = k_ + (long long)begin * D;
      const bool there = begin + own < length;
      #pragma unroll
      for (int j = first; j < last; ++j)
        keys[j] = there ? *reinterpret_cast<const uint4*>(from + 32 * j) : make_uint4(0, 0, 0, 0);
    };
    auto load_values = [&](int begin) {
      const InT* from = v_ + (long long)begin * D;
      const int n = length - begin - half;
      #pragma unroll
      for (int i = 0; i < SPLIT / 2; ++i)
        values[i] = 2 * i < n ? *reinterpret_cast<const unsigned*>(from + 2 * i * D) : 0u;
    };
    int begin = blockIdx.y * SPLIT;
    if (begin < length) {
      load_keys(begin, 0, STEPS);
      load_values(begin);
    }
    for (; begin < length; begin += gridDim.y * SPLIT) {
      const int split = begin / SPLIT, next = begin + gridDim.y * SPLIT;
      float dots[4] = {};
      #pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        uint4 a = make_uint4(0, 0, 0, 0), b = make_uint4(0, 0, 0, 0);
        if (column < count) a = *reinterpret_cast<const uint4*>(low_ + 32 * j);
        if (column + 8 < count) b = *reinterpret_cast<const uint4*>(high_ + 32 * j);
        Tensor<InT>::mma(dots, a.x, b.x, a.y, b.y, keys[j].x, keys[j].y);
        Tensor<InT>::mma(dots, a.z, b.z, a.w, b.w, keys[j].z, keys[j].w);
      }
      if (next < length) load_keys(next, 0, EARLY);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = column + 8 * (i >> 1), key = warp + WARPS * (2 * part + (i & 1)), place = begin + key;
        if (m >= count) continue;
        const int* span = spans + 3 * (row + m / GQA);
        const bool visible = place <= span[0] && (place < span[1] || place >= span[2]);
        scores[key][m] = visible ? dots[i] * scale[0] : -INFINITY;
      }
      __syncthreads();
      for (int m = warp; m < count; m += WARPS) {
        const float a = scores[lane][m], b = scores[lane + 32][m];
        float top = fmaxf(a, b);
        #pragma unroll
        for (int x = 16; x > 0; x >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, x));
        const float pa = expf(a - top), pb = expf(b - top);
        scores[lane][m] = pa;
        scores[lane + 32][m] = pb;
        float sum = pa + pb;
        #pragma unroll
        for (int x = 16; x > 0; x >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, x);
        float* to = sums + (of(m) * splits + split) * 2;
        if (lane == 0) *reinterpret_cast<float2*>(to) = make_float2(top, sum);
      }
      __syncthreads();
      float acc[PADDED][2] = {};
      #pragma unroll
      for (int i = 0; i < SPLIT / 2; ++i) {
        const float4* shares = reinterpret_cast<const float4*>(scores[2 * i + half]);
        const float low = Tensor<InT>::low(values[i]), high = Tensor<InT>::high(values[i]);
        #pragma unroll
        for (int m = 0; m < ALL; m += 4) {
          const float4 four = shares[m / 4];
          const float p[4] = {four.x, four.y, four.z, four.w};
          #pragma unroll
          for (int c = 0; c < 4; ++c) {
            acc[m + c][0] = __fmaf_rn(p[c], low, acc[m + c][0]);
            acc[m + c][1] = __fmaf_rn(p[c], high, acc[m + c][1]);
          }
        }
      }
      if (next < length) {
        load_keys(next, EARLY, STEPS);
        load_values(next);
      }
      #pragma unroll
      for (int m = 0; m < ALL; ++m) {
        const float low = acc[m][0] + __shfl_xor_sync(0xffffffff, acc[m][0], 16);
        const float high = acc[m][1] + __shfl_xor_sync(0xffffffff, acc[m][1], 16);
        float* to = partial + (of(m) * splits + split) * D + d;
        if (m < count && half == 0) *reinterpret_cast<float2*>(to) = make_float2(low, high);
      }
      __syncthreads();
    }
  }
"""

_COMBINE_SOURCE = r"""
  // One block: 32 elements of one head of one row. A warp takes splits warp, warp + 8, ...
  constexpr int WARPS = 8, PARTS = D / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.x / PARTS, row = blockIdx.y, d = blockIdx.x % PARTS * 32 + lane;
  const int heads = gridDim.x / PARTS;
  const int splits = spans[3 * row] / 64 + 1;
  const long long base = ((long long)row * heads + head) * partial_shape[2];
  float top = -INFINITY;
  #pragma unroll 4
  for (int i = lane; i < splits; i += 32) top = fmaxf(top, sums[(base + i) * 2]);
  #pragma unroll
  for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, m));
  float sum = 0.0f, acc = 0.0f;
  #pragma unroll 8
  for (int i = warp; i < splits; i += WARPS) {
    const float weight = expf(sums[(base + i) * 2] - top);
    sum = __fmaf_rn(weight, sums[(base + i) * 2 + 1], sum);
    acc = __fmaf_rn(weight, partial[(base + i) * D + d], acc);
  }
  __shared__ float shares[2][WARPS][32];
  shares[0][warp][lane] = sum;
  shares[1][warp][lane] = acc;
  __syncthreads();
  if (warp) return;
  sum = acc = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    sum += shares[0][w][lane];
    acc += shares[1][w][lane];
  }
  const float gate = static_cast<float>(x[(long long)row * x_shape[1] + head * 2 * D + D + d]);
  out[((long long)row * heads + head) * D + d] = static_cast<InT>(acc / sum / (1.0f + expf(-gate)));
"""

_prepare = prepare_kernel(CudaKernel, "(h < HQ ? h * 2 * D : 2 * HQ * D + (h - HQ) * D)")
_combine = CudaKernel("attention_combine", ["partial", "sums", "spans", "x"], ["out"], _COMBINE_SOURCE)


def _attend_kernel(slots: int) -> CudaKernel:
    pairs = [f"pair{slot}" for slot in range(slots)]
    source = _ATTEND_SOURCE.replace("PAIRS", ", ".join(pairs))
    inputs = ["q", "places", "spans", "caps", "written", "scale", *pairs]
    return CudaKernel(f"attention_split{slots}", inputs, ["partial", "sums"], source, HEADER + _BOUNDED)


@lru_cache
def no_pair(dtype: mx.Dtype) -> mx.array:
    """Return an array for a slot without rows. MLX ends a graph early that has many bytes of inputs."""
    return mx.array([0], dtype)


_attend = {slots: _attend_kernel(slots) for slots in (1, SLOTS)}


def prepare_rows(
    shape: AttentionShape, x: mx.array, places: mx.array, constants: tuple[mx.array, ...]
) -> tuple[mx.array, mx.array]:
    """See `run_prepare`. A row of `x` has query and gate of each head in turn, then keys, then values."""
    return run_prepare(_prepare, shape, x, places, constants)


def attend_rows(
    shape: AttentionShape,
    q: mx.array,
    x: mx.array,
    rows: RowArrays,
    scale: mx.array,
    pairs: Sequence[mx.array],
) -> mx.array:
    """Return the attention of `q [rows, query_heads, 256]` times the sigmoid of the gates in `x`.

    The result has the shape `[rows, query_heads * 256]`. `pairs`, up to `SLOTS`, are `[2, kv_heads, room, 256]`.
    """
    places, spans, caps, written = rows
    count, heads, kv = q.shape[0], shape.query_heads, shape.kv_heads
    slots = 1 if len(pairs) == 1 else SLOTS
    together = 1 if count == len(pairs) else MOST_GROUPED * kv // heads
    splits = -(-max(pair.shape[2] for pair in pairs) // SPLIT)
    unused = [no_pair(q.dtype)] * (slots - len(pairs))
    wide = -(-count // together)
    each = -(-splits * kv * wide // BLOCKS)
    partial, sums = _attend[slots](
        [q, places, spans, caps, written, scale, *pairs, *unused],
        blocks=(wide, -(-splits // each), kv),
        template=[("InT", q.dtype), ("GQA", heads // kv), ("D", HEAD_DIM), ("ROWS", together)],
        shapes=[(count, heads, splits, HEAD_DIM), (count, heads, splits, 2)],
        dtypes=[mx.float32] * 2,
    )
    return _combine(
        [partial, sums, spans, x],
        blocks=(heads * HEAD_DIM // 32, count, 1),
        template=[("InT", q.dtype), ("D", HEAD_DIM)],
        shapes=[(count, heads * HEAD_DIM)],
        dtypes=[q.dtype],
    )[0]


_WRITE_SOURCE = r"""
  // One block a row. A warp copies the keys or the values of one head.
  const int lane = threadIdx.x & 31, row = blockIdx.x, rows = fresh_shape[2];
  const int slot = places[2 * row], place = spans[3 * row];
  const InT* const table[] = {PAIRS};
  InT* const pair = const_cast<InT*>(table[slot]);
  for (int head = threadIdx.x >> 5; head < 2 * HK; head += blockDim.x >> 5) {
    const InT* from = fresh + ((long long)head * rows + row) * D;
    InT* to = pair + ((long long)head * caps[slot] + place) * D;
    reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(from)[lane];
  }
  if (row == 0 && threadIdx.x == 0) written[0] = 1;
"""


def _write_kernel(slots: int) -> CudaKernel:
    pairs, before = ([f"{name}{slot}" for slot in range(slots)] for name in ("pair", "before"))
    inputs = ["fresh", "places", "spans", "caps", *pairs, *before]
    source = _WRITE_SOURCE.replace("PAIRS", ", ".join(pairs))
    return CudaKernel(f"attention_write{slots}", inputs, ["written"], source)


_write = {slots: _write_kernel(slots) for slots in (1, SLOTS)}


def write_rows(new: mx.array, rows: RowArrays, pairs: Sequence[mx.array], before: Sequence[mx.array]) -> mx.array:
    """Write `new [2, kv_heads, rows, 256]` into the memory of `pairs`, up to `SLOTS`. Return int32 `[1]`, `written`.

    Each of `pairs [2, kv_heads, room, 256]` is a whole array in memory, and no row that somebody reads is written.
    `before` are arrays that must be computed first, one for each pair.
    """
    places, spans, caps, _ = rows
    slots = 1 if len(pairs) == 1 else SLOTS
    more = slots - len(pairs)
    inputs = [new, places, spans, caps, *pairs, *[no_pair(new.dtype)] * more]
    (written,) = _write[slots](
        [*inputs, *before, *[before[0]] * more],
        blocks=(new.shape[2], 1, 1),
        template=[("InT", new.dtype), ("HK", new.shape[1]), ("D", HEAD_DIM)],
        shapes=[(1,)],
        dtypes=[mx.int32],
    )
    return written


class InPlaceKV(PairKV):
    """A cache whose array `write_rows` may change. Every other use of the array comes after that in the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.written: mx.array | None = None
        """The result of the newest `write_rows`."""
        self._whole = False
        """True if the array has memory of its own, in its order."""

    def copied_nbytes(self, rows: int) -> int:
        return 0 if rows <= FEW_ROWS else self.nbytes

    def takes(self, new: mx.array) -> bool:
        """Return whether `write_rows` may write rows as those of `new` into the array, after `reserve`."""
        pair, kind = self.pair, (*new.shape[:2], new.shape[3], new.dtype)
        known = pair is not None and (*pair.shape[:2], pair.shape[3], pair.dtype) == kind
        return known and self._whole

    def add_rows(self, width: int, written: mx.array) -> None:
        """Count `width` rows that `write_rows` writes, with its result."""
        self.offset += width
        self.written = written

    def reserve(self, width: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> None:
        if self.offset + width > self.room:
            self._settle()
            self._whole = self.pair is not None  # zeros may be a single number in memory
            super().reserve(width, kv_heads, dim, dtype)

    def write(self, new: mx.array) -> mx.array:
        self._settle()
        pair = super().write(new)
        self._whole = new.shape[2] < self.room  # else it is `new`, perhaps a part of another array
        return pair

    def arrays(self) -> list[mx.array]:
        return [*super().arrays(), *([] if self.written is None else [self.written])]

    def _settle(self) -> None:
        """Start the work up to the newest row. A graph that begins later runs after it, though MLX sees no reason."""
        if self.written is not None:
            mx.async_eval(self.written)
            self.written = None

    def _parts(self, start: int = 0) -> list[mx.array]:
        self._settle()
        return super()._parts(start)

    def _set_parts(self, parts: Sequence[mx.array]) -> None:
        super()._set_parts(parts)
        self._whole = True

    def _empty(self) -> InPlaceKV:
        return InPlaceKV()
