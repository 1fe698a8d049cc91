"""Gated attention of single rows on an NVIDIA GPU: norms and RoPE in one launch, attention of up to 8 sequences in two.

MLX has no fused attention for heads of 256 there. A row attends to the keys before it and to its own, in splits of 64
keys from the first key on. So its result does not depend on the rows and sequences that run with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mtp.layers.cuda.kernel import CudaKernel
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
  // One block: one query row, one K/V head, one split of SPLIT keys. A warp takes keys warp, warp + 8, ...
  // The rows of a window are neighbours in the grid, so the later ones find the keys in the cache of the GPU.
  constexpr int SPLIT = 64, WARPS = 8, OWN = SPLIT / WARPS, E = D / 32;
  const int row = blockIdx.x, split = blockIdx.y, kv_head = blockIdx.z;
  const int slot = places[2 * row];
  const int length = spans[3 * row] + 1, hole = spans[3 * row + 1], hole_end = spans[3 * row + 2];
  const int begin = split * SPLIT;
  if (begin >= length) return;
  const int n = min(SPLIT, length - begin);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int splits = gridDim.y, heads = gridDim.z * GQA;
  const long long first = (long long)row * heads + kv_head * GQA;
  const InT* const table[] = {PAIRS};
  const long long head_size = (long long)caps[slot] * D;
  const InT* k_ = table[slot] + kv_head * head_size + (long long)begin * D + lane * E;
  const InT* v_ = k_ + gridDim.z * head_size;
  __shared__ float scores[GQA][SPLIT];
  __shared__ float shares[2][WARPS][D];
  // All loads of a lane are under way at once: elements E * lane ... of its warp's keys.
  uint4 held[OWN];
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int key = warp + WARPS * i;
    held[i] = key < n ? *reinterpret_cast<const uint4*>(k_ + key * D) : make_uint4(0, 0, 0, 0);
  }
  {
    float kf[OWN][E];
    #pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const InT* raw = reinterpret_cast<const InT*>(&held[i]);
      #pragma unroll
      for (int e = 0; e < E; ++e) kf[i][e] = static_cast<float>(raw[e]);
    }
    #pragma unroll 1
    for (int h = 0; h < GQA; ++h) {
      const uint4 packed = *reinterpret_cast<const uint4*>(q + (first + h) * D + lane * E);
      const InT* raw = reinterpret_cast<const InT*>(&packed);
      float sums_[OWN] = {};
      #pragma unroll
      for (int e = 0; e < E; ++e) {
        const float qe = static_cast<float>(raw[e]) * scale[0];
        #pragma unroll
        for (int i = 0; i < OWN; ++i) sums_[i] = __fmaf_rn(qe, kf[i][e], sums_[i]);
      }
      // Each exchange adds two lanes and halves the keys of a lane, until it has one.
      #pragma unroll
      for (int half = OWN / 2, m = 16; half > 0; half >>= 1, m >>= 1) {
        const bool upper = lane & m;
        #pragma unroll
        for (int i = 0; i < half; ++i) {
          const float given = upper ? sums_[i] : sums_[i + half];
          const float kept = upper ? sums_[i + half] : sums_[i];
          sums_[i] = kept + __shfl_xor_sync(0xffffffff, given, m);
        }
      }
      float sum = sums_[0];
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      const int key = warp + WARPS * (lane >> 2);
      const bool visible = begin + key < hole || begin + key >= hole_end;
      if ((lane & 3) == 0) scores[h][key] = visible ? sum : -INFINITY;
    }
  }
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int key = warp + WARPS * i;
    if (key < n) held[i] = *reinterpret_cast<const uint4*>(v_ + key * D);
  }
  __syncthreads();
  for (int h = warp; h < GQA; h += WARPS) {
    const float a = lane < n ? scores[h][lane] : -INFINITY;
    const float b = lane + 32 < n ? scores[h][lane + 32] : -INFINITY;
    float top = fmaxf(a, b);
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, m));
    const float pa = expf(a - top), pb = expf(b - top);
    scores[h][lane] = pa;
    scores[h][lane + 32] = pb;
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
  float acc[GQA][E] = {};
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int key = warp + WARPS * i;
    if (key < n) {
      const InT* raw = reinterpret_cast<const InT*>(&held[i]);
      float v[E];
      #pragma unroll
      for (int e = 0; e < E; ++e) v[e] = static_cast<float>(raw[e]);
      #pragma unroll
      for (int h = 0; h < GQA; ++h) {
        const float p = scores[h][key];
        #pragma unroll
        for (int e = 0; e < E; ++e) acc[h][e] = __fmaf_rn(p, v[e], acc[h][e]);
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < GQA; ++h) {
    float (*shared)[D] = shares[h & 1];
    #pragma unroll
    for (int e = 0; e < E; ++e) shared[warp][lane + 32 * e] = acc[h][e];
    __syncthreads();
    float sum = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared[w][tid];
    partial[((first + h) * splits + split) * D + lane * E + warp] = sum;
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
    return CudaKernel(f"attention_split{slots}", inputs, ["partial", "sums"], source)


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
