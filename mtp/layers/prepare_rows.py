"""The heads of projected rows, normed and rotated in one launch on a GPU, the same text for NVIDIA and Apple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.source_kernel import THREADS, SourceKernel

HEAD_DIM = 256
"""Dimension of a head; the kernels support only this one."""

SOURCE = r"""
  // One warp a head of a row: norm, RoPE. Heads: q, then k; v is copied.
  const int lane = threadIdx.x & 31;
  const int unit = blockIdx.x * 8 + (threadIdx.x >> 5);
  const int rows_ = x_shape[0], width = x_shape[1];
  constexpr int HEADS = HQ + 2 * HK;
  if (unit >= rows_ * HEADS) return;
  const int r = unit / HEADS, h = unit % HEADS;
  constexpr int E = D / 32;
  const $device InT* from = x + ($int64)r * width
      + $head;
  float v[E];
  #pragma unroll
  for (int i = 0; i < E; ++i) v[i] = static_cast<float>(from[lane + 32 * i]);
  $device InT* to = h < HQ ? q + (($int64)r * HQ + h) * D
          : h < HQ + HK ? k + (($int64)(h - HQ) * rows_ + r) * D
                        : k + ($int64)HK * rows_ * D + (($int64)(h - HQ - HK) * rows_ + r) * D;
  if (h < HQ + HK) {
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < E; ++i) sum = __fmaf_rn(v[i], v[i], sum);
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
    const float scale = rsqrtf(sum / D + eps[0]);
    const $device InT* weight = h < HQ ? q_norm : k_norm;
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


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer, and the elements of each that RoPE rotates."""

    query_heads: int
    kv_heads: int
    rope: int


def can_prepare(attention: Any) -> bool:
    """Return whether the kernel computes the norms and RoPE of `attention`."""
    rope = attention.rope
    return (
        attention.head_dim == HEAD_DIM
        and type(rope) is nn.RoPE
        and not rope.traditional
        and rope.scale == 1.0
        and rope.dims % 64 == 0
    )


def constants_of(attention: Any) -> tuple[mx.array, ...]:
    """Return the arrays of a layer that the kernel takes: norm weights, RoPE's inverse frequencies and eps."""
    half = mx.arange(0, attention.rope.dims, 2, dtype=mx.float32) / attention.rope.dims
    return (
        attention.q_norm.weight,
        attention.k_norm.weight,
        mx.power(attention.rope.base, -half),
        mx.array([attention.q_norm.eps]),
    )


def prepare_kernel(language: type[SourceKernel], head: str) -> SourceKernel:
    """Return the kernel in `language`. Head `h` begins at `head` in a row."""
    inputs = ["x", "places", "q_norm", "k_norm", "inv_freq", "eps"]
    return language("attention_prepare", inputs, ["q", "k"], SOURCE.replace("$head", head))


def run_prepare(
    kernel: SourceKernel,
    shape: AttentionShape,
    x: mx.array,
    places: mx.array,
    constants: tuple[mx.array, ...],
) -> tuple[mx.array, mx.array]:
    """Return q `[rows, query_heads, 256]`, and k and v `[2, kv_heads, rows, 256]`, normed and rotated.

    They are those of rows `x` at `places` int32 `[rows, 2]`: slot and position.
    """
    rows, heads, kv = x.shape[0], shape.query_heads, shape.kv_heads
    units = rows * (heads + 2 * kv)
    q, new = kernel(
        [x, places, *constants],
        blocks=(-(-units * 32 // THREADS), 1, 1),
        template=[("InT", x.dtype), ("HQ", heads), ("HK", kv), ("D", HEAD_DIM), ("ROPE", shape.rope)],
        shapes=[(rows, heads, HEAD_DIM), (2, kv, rows, HEAD_DIM)],
        dtypes=[x.dtype] * 2,
    )
    return q, new
