"""Gated attention of single rows on an NVIDIA GPU: norms and RoPE in one launch, attention of up to 8 sequences in two.

MLX has no fused attention for heads of 256 there. A row attends to the keys before it and to its own, in splits of 64
keys from the first key on. So its result does not depend on the rows and sequences that run with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtp.layers.cuda.kernel import CudaKernel
from mtp.layers.prepare_rows import HEAD_DIM, AttentionShape, prepare_kernel, run_prepare

SPLIT = 64
SLOTS = 8
"""Sequences of one launch: each has K/V arrays of its own, which are arguments of the kernel."""

_ATTEND_SOURCE = r"""
  // One block: one query row, one K/V head, one split of SPLIT keys.
  constexpr int SPLIT = 64;
  constexpr int E = D / 32;
  const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int slot = places[2 * row], length = places[2 * row + 1] + 1;
  const int begin = split * SPLIT;
  if (begin >= length) return;
  const int n = min(SPLIT, length - begin);
  const InT* const key_table[] = {KEYS};
  const InT* const value_table[] = {VALUES};
  const long long offset = ((long long)kv_head * caps[slot] + begin) * D;
  const InT* k_ = key_table[slot] + offset;
  const InT* v_ = value_table[slot] + offset;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  __shared__ float scores[GQA][SPLIT];
  // Scores: a warp takes keys warp, warp + 8, ...; a lane elements E * lane ... + E - 1.
  float qv[GQA][E];
  #pragma unroll
  for (int h = 0; h < GQA; ++h) {
    const InT* from = q + ((long long)row * gridDim.y * GQA + kv_head * GQA + h) * D + lane * E;
    #pragma unroll
    for (int e = 0; e < E; ++e) qv[h][e] = static_cast<float>(from[e]) * scale[0];
  }
  #pragma unroll 4
  for (int key = warp; key < n; key += 8) {
    InT raw[E];
    *reinterpret_cast<uint4*>(raw) = *reinterpret_cast<const uint4*>(k_ + (long long)key * D + lane * E);
    #pragma unroll
    for (int h = 0; h < GQA; ++h) {
      float sum = 0.0f;
      #pragma unroll
      for (int e = 0; e < E; ++e) sum = __fmaf_rn(qv[h][e], static_cast<float>(raw[e]), sum);
      #pragma unroll
      for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
      if (lane == 0) scores[h][key] = sum;
    }
  }
  __syncthreads();
  const int splits = gridDim.x, heads = gridDim.y * GQA;
  for (int h = warp; h < GQA; h += 8) {
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
      float* to = sums + (((long long)row * heads + kv_head * GQA + h) * splits + split) * 2;
      to[0] = top;
      to[1] = sum;
    }
  }
  __syncthreads();
  float acc[GQA] = {};
  #pragma unroll 8
  for (int key = 0; key < n; ++key) {
    const float v = static_cast<float>(v_[(long long)key * D + tid]);
    #pragma unroll
    for (int h = 0; h < GQA; ++h) acc[h] = __fmaf_rn(scores[h][key], v, acc[h]);
  }
  #pragma unroll
  for (int h = 0; h < GQA; ++h) {
    partial[(((long long)row * heads + kv_head * GQA + h) * splits + split) * D + tid] = acc[h];
  }
"""

_COMBINE_SOURCE = r"""
  const int head = blockIdx.x, row = blockIdx.y, d = threadIdx.x;
  const int heads = gridDim.x;
  const int total = partial_shape[2];
  const int splits = (places[2 * row + 1] + 64) / 64;
  const long long base = ((long long)row * heads + head) * total;
  float top = -INFINITY;
  for (int i = 0; i < splits; ++i) top = fmaxf(top, sums[(base + i) * 2]);
  float sum = 0.0f, acc = 0.0f;
  #pragma unroll 4
  for (int i = 0; i < splits; ++i) {
    const float weight = expf(sums[(base + i) * 2] - top);
    sum = __fmaf_rn(weight, sums[(base + i) * 2 + 1], sum);
    acc = __fmaf_rn(weight, partial[(base + i) * D + d], acc);
  }
  const float gate = static_cast<float>(x[(long long)row * x_shape[1] + head * 2 * D + D + d]);
  out[((long long)row * heads + head) * D + d] = static_cast<InT>(acc / sum / (1.0f + expf(-gate)));
"""

_prepare = prepare_kernel(
    CudaKernel,
    ["q", "k", "v_out"],
    head="(h < HQ ? h * 2 * D : 2 * HQ * D + (h - HQ) * D)",
    values="v_out",
)
_combine = CudaKernel(
    "attention_combine", ["partial", "sums", "places", "x"], ["out"], _COMBINE_SOURCE
)


def _attend_kernel(slots: int) -> CudaKernel:
    keys, values = ([f"{name}{slot}" for slot in range(slots)] for name in ("keys", "values"))
    source = _ATTEND_SOURCE.replace("KEYS", ", ".join(keys)).replace("VALUES", ", ".join(values))
    inputs = ["q", "places", "caps", "scale", *keys, *values]
    return CudaKernel(f"attention_split{slots}", inputs, ["partial", "sums"], source)


_attend = {slots: _attend_kernel(slots) for slots in (1, SLOTS)}


def prepare_rows(
    shape: AttentionShape, x: mx.array, places: mx.array, constants: tuple[mx.array, ...]
) -> tuple[mx.array, mx.array, mx.array]:
    """Return q `[rows, query_heads, 256]`, k and v `[kv_heads, rows, 256]` of projected rows, normed and turned.

    A row of `x` has query and gate of each head in turn, then keys, then values. `places` int32 `[rows, 2]`: slot and
    position. `constants` are the norm weights of queries and keys, RoPE's inverse frequencies and eps.
    """
    rows, kv = x.shape[0], shape.kv_heads
    shapes = [(rows, shape.query_heads, HEAD_DIM), (kv, rows, HEAD_DIM), (kv, rows, HEAD_DIM)]
    q, k, v = run_prepare(_prepare, shape, x, places, constants, shapes)
    return q, k, v


def attend_rows(
    shape: AttentionShape,
    q: mx.array,
    x: mx.array,
    places: mx.array,
    caps: mx.array,
    scale: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
) -> mx.array:
    """Return the attention of `q [rows, query_heads, 256]` times the sigmoid of the gates in `x`.

    The result has the shape `[rows, query_heads * 256]`.

    `keys` and `values`, up to `SLOTS` of each, are `[1, kv_heads, cap, 256]`; `caps` int32 `[SLOTS]` has their
    lengths. A row attends to the keys of its slot up to its position.
    """
    rows, heads, kv = q.shape[0], shape.query_heads, shape.kv_heads
    slots = 1 if len(keys) == 1 else SLOTS
    spare = slots - len(keys)
    splits = -(-max(k.shape[2] for k in keys) // SPLIT)
    partial, sums = _attend[slots](
        [q, places, caps, scale, *keys, *[keys[0]] * spare, *values, *[values[0]] * spare],
        blocks=(splits, kv, rows),
        template=[("InT", q.dtype), ("GQA", heads // kv), ("D", HEAD_DIM)],
        shapes=[(rows, heads, splits, HEAD_DIM), (rows, heads, splits, 2)],
        dtypes=[mx.float32] * 2,
    )
    return _combine(
        [partial, sums, places, x],
        blocks=(heads, rows, 1),
        template=[("InT", q.dtype), ("D", HEAD_DIM)],
        shapes=[(rows, heads * HEAD_DIM)],
        dtypes=[q.dtype],
    )[0]
