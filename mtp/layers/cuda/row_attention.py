"""Gated attention of single rows on an NVIDIA GPU: norms and RoPE in one launch, attention of up to 8 sequences in two.

MLX has no fused attention for heads of 256 there. A row attends to the keys before it and to its own, in splits of 64
keys from the first key on. So its result does not depend on the rows and sequences that run with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mtp.layers.cuda.kernel import CudaKernel
from mtp.layers.source_kernel import THREADS

HEAD_DIM = 256
SPLIT = 64
SLOTS = 8
"""Sequences of one launch: each has K/V arrays of its own, which are arguments of the kernel."""

_PREPARE_SOURCE = r"""
  // One warp a head of a row: norm, RoPE. Heads: q, then k; v is copied.
  const int lane = threadIdx.x & 31;
  const int unit = blockIdx.x * 8 + (threadIdx.x >> 5);
  const int rows_ = x_shape[0], width = x_shape[1];
  constexpr int HEADS = HQ + 2 * HK;
  if (unit >= rows_ * HEADS) return;
  const int r = unit / HEADS, h = unit % HEADS;
  constexpr int E = D / 32;
  const InT* from = x + (long long)r * width
      + (h < HQ ? h * 2 * D : 2 * HQ * D + (h - HQ) * D);
  float v[E];
  #pragma unroll
  for (int i = 0; i < E; ++i) v[i] = static_cast<float>(from[lane + 32 * i]);
  InT* to = h < HQ ? q + ((long long)r * HQ + h) * D
          : h < HQ + HK ? k + ((long long)(h - HQ) * rows_ + r) * D
                        : v_out + ((long long)(h - HQ - HK) * rows_ + r) * D;
  if (h < HQ + HK) {
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < E; ++i) sum = __fmaf_rn(v[i], v[i], sum);
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
    const float scale = rsqrtf(sum / D + eps[0]);
    const InT* weight = h < HQ ? q_norm : k_norm;
    #pragma unroll
    for (int i = 0; i < E; ++i) v[i] = v[i] * scale * static_cast<float>(weight[lane + 32 * i]);
    // The first ROPE elements turn in pairs (i, i + ROPE / 2); ROPE / 2 is a multiple of 32.
    constexpr int HALF = ROPE / 64;
    const float position = static_cast<float>(places[2 * r + 1]);
    #pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const float angle = position * inv_freq[lane + 32 * i];
      float sine, cosine;
      sincosf(angle, &sine, &cosine);
      const float a = v[i], b = v[i + HALF];
      v[i] = a * cosine - b * sine;
      v[i + HALF] = a * sine + b * cosine;
    }
  }
  #pragma unroll
  for (int i = 0; i < E; ++i) to[lane + 32 * i] = static_cast<InT>(v[i]);
"""

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

_prepare = CudaKernel(
    "attention_prepare",
    ["x", "places", "q_norm", "k_norm", "inv_freq", "eps"],
    ["q", "k", "v_out"],
    _PREPARE_SOURCE,
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


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer, and the elements of each that RoPE turns."""

    query_heads: int
    kv_heads: int
    rope: int


def prepare_rows(
    shape: AttentionShape, x: mx.array, places: mx.array, constants: tuple[mx.array, ...]
) -> tuple[mx.array, mx.array, mx.array]:
    """Return q `[rows, query_heads, 256]`, k and v `[kv_heads, rows, 256]` of projected rows, normed and turned.

    A row of `x` has query and gate of each head in turn, then keys, then values. `places` int32 `[rows, 2]`: slot and
    position. `constants` are the norm weights of queries and keys, RoPE's inverse frequencies and eps.
    """
    rows = x.shape[0]
    heads, kv = shape.query_heads, shape.kv_heads
    units = rows * (heads + 2 * kv)
    q, k, v = _prepare(
        [x, places, *constants],
        blocks=(-(-units * 32 // THREADS), 1, 1),
        template=[
            ("InT", x.dtype),
            ("HQ", heads),
            ("HK", kv),
            ("D", HEAD_DIM),
            ("ROPE", shape.rope),
        ],
        shapes=[(rows, heads, HEAD_DIM), (kv, rows, HEAD_DIM), (kv, rows, HEAD_DIM)],
        dtypes=[x.dtype] * 3,
    )
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
