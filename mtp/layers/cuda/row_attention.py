"""Gated attention of single rows on an NVIDIA GPU: norms and RoPE in one launch, attention of up to 8 sequences in two.

MLX has no fused attention for heads of 256 there. A row attends to the keys before it and to its own, in splits of 64
keys from the first key on. So its result does not depend on the rows and sequences that run with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mtp.layers.cuda.kernel import CudaKernel
from mtp.layers.cuda.packed_linear import HEADER
from mtp.layers.prepare_rows import HEAD_DIM, AttentionShape, prepare_kernel, run_prepare

SPLIT = 64
SLOTS = 8
"""Sequences of one launch: each has a K/V array of its own, which is an argument of the kernel."""


class RowArrays(NamedTuple):
    """The places of the rows of a launch, in three int32 arrays.

    `places [rows, 2]` has slot and position of each row. `caps [SLOTS]` has the lengths of the K/V arrays of the slots.
    `spans [rows, 3]` has the last entry that a row sees, its own, and begin and end of a range that it does not see.
    """

    places: mx.array
    spans: mx.array
    caps: mx.array


_ATTEND_SOURCE = r"""
  // One block: one query row, one K/V head, one split of SPLIT keys. Tensor cores multiply all heads with the keys
  // warp, warp + 8, ... of a warp. For the values a warp has 32 elements of D, and half a warp every other key.
  // The rows of a window are neighbours in the grid, so the later ones find the keys in the cache of the GPU.
  constexpr int SPLIT = 64, WARPS = 8, STEPS = D / 32, HEADS = GQA <= 8 ? 8 : 16;
  const int row = blockIdx.x, split = blockIdx.y, kv_head = blockIdx.z;
  const int slot = places[2 * row];
  const int length = spans[3 * row] + 1, hole = spans[3 * row + 1], hole_end = spans[3 * row + 2];
  const int begin = split * SPLIT;
  if (begin >= length) return;
  const int n = min(SPLIT, length - begin);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = lane >> 2, part = lane & 3;
  const int splits = gridDim.y, heads = gridDim.z * GQA;
  const long long first = (long long)row * heads + kv_head * GQA;
  const InT* const table[] = {PAIRS};
  const long long head_size = (long long)caps[slot] * D;
  const InT* k_ = table[slot] + kv_head * head_size + (long long)begin * D;
  const InT* v_ = k_ + gridDim.z * head_size;
  __shared__ __align__(16) float scores[SPLIT][HEADS];
  // All loads of a lane are under way at once. The fragments of queries and keys have the elements in one order.
  const int own = warp + WARPS * column;
  uint4 keys[STEPS];
  #pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    const InT* from = k_ + own * D + 32 * j + 8 * part;
    keys[j] = own < n ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  const int half = lane >> 4, d = 32 * warp + 2 * (lane & 15);
  unsigned values[SPLIT / 2];
  #pragma unroll
  for (int i = 0; i < SPLIT / 2; ++i) {
    const int key = 2 * i + half;
    values[i] = key < n ? *reinterpret_cast<const unsigned*>(v_ + key * D + d) : 0u;
  }
  float dots[4] = {};
  const InT* q_ = q + (first + column) * D + 8 * part;
  #pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    uint4 a = make_uint4(0, 0, 0, 0), b = make_uint4(0, 0, 0, 0);
    if (column < GQA) a = *reinterpret_cast<const uint4*>(q_ + 32 * j);
    if (column + 8 < GQA) b = *reinterpret_cast<const uint4*>(q_ + 8 * D + 32 * j);
    Tensor<InT>::mma(dots, a.x, b.x, a.y, b.y, keys[j].x, keys[j].y);
    Tensor<InT>::mma(dots, a.z, b.z, a.w, b.w, keys[j].z, keys[j].w);
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = warp + WARPS * (2 * part + i), place = begin + key;
    const bool visible = key < n && (place < hole || place >= hole_end);
    if (column < GQA) scores[key][column] = visible ? dots[i] * scale[0] : -INFINITY;
    if (column + 8 < GQA) scores[key][column + 8] = visible ? dots[2 + i] * scale[0] : -INFINITY;
  }
  __syncthreads();
  for (int h = warp; h < GQA; h += WARPS) {
    const float a = scores[lane][h], b = scores[lane + 32][h];
    float top = fmaxf(a, b);
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, m));
    const float pa = expf(a - top), pb = expf(b - top);
    scores[lane][h] = pa;
    scores[lane + 32][h] = pb;
    float sum = pa + pb;
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
    if (lane == 0) {
      float* to = sums + ((first + h) * splits + split) * 2;
      to[0] = top;
      to[1] = sum;
    }
  }
  __syncthreads();
  float acc[HEADS][2] = {};
  #pragma unroll
  for (int i = 0; i < SPLIT / 2; ++i) {
    const float4* shares = reinterpret_cast<const float4*>(scores[2 * i + half]);
    const float low = Tensor<InT>::low(values[i]), high = Tensor<InT>::high(values[i]);
    #pragma unroll
    for (int h = 0; h < GQA; h += 4) {
      const float4 p = shares[h / 4];
      const float own_[4] = {p.x, p.y, p.z, p.w};
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        acc[h + c][0] = __fmaf_rn(own_[c], low, acc[h + c][0]);
        acc[h + c][1] = __fmaf_rn(own_[c], high, acc[h + c][1]);
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < GQA; ++h) {
    const float low = acc[h][0] + __shfl_xor_sync(0xffffffff, acc[h][0], 16);
    const float high = acc[h][1] + __shfl_xor_sync(0xffffffff, acc[h][1], 16);
    float* to = partial + ((first + h) * splits + split) * D + d;
    if (half == 0) *reinterpret_cast<float2*>(to) = make_float2(low, high);
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
_combine = CudaKernel(
    "attention_combine", ["partial", "sums", "spans", "x"], ["out"], _COMBINE_SOURCE
)


def _attend_kernel(slots: int) -> CudaKernel:
    pairs = [f"pair{slot}" for slot in range(slots)]
    source = _ATTEND_SOURCE.replace("PAIRS", ", ".join(pairs))
    inputs = ["q", "places", "spans", "caps", "scale", *pairs]
    return CudaKernel(f"attention_split{slots}", inputs, ["partial", "sums"], source, HEADER)


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
    places, spans, caps = rows
    count, heads, kv = q.shape[0], shape.query_heads, shape.kv_heads
    slots = 1 if len(pairs) == 1 else SLOTS
    splits = -(-max(pair.shape[2] for pair in pairs) // SPLIT)
    partial, sums = _attend[slots](
        [q, places, spans, caps, scale, *pairs, *[pairs[0]] * (slots - len(pairs))],
        blocks=(count, splits, kv),
        template=[("InT", q.dtype), ("GQA", heads // kv), ("D", HEAD_DIM)],
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
