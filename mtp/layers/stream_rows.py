"""The sum and norm of one residual stream or several, in one launch on a GPU, the same text for NVIDIA and Apple."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from mtp.layers.source_kernel import SourceKernel

NORM_SOURCE = r"""
  // A block of threads computes a stream of a row: it adds the output of a layer's block, and normalizes the sum.
  const int tid = threadIdx.x, row = blockIdx.x / STREAMS, stream = blockIdx.x % STREAMS;
  const $int64 start = ($int64)blockIdx.x * HIDDEN;
  $array float sums[8];
  float gate = 1.0f;
  if (ADDS == 2) {
    const float logit = static_cast<float>(gates[($int64)row * gates_shape[1] + FIRST + stream]);
    gate = 2.0f / (1.0f + expf(-logit / STREAMS));
  }
  constexpr int OWN = (HIDDEN + 255) / 256;
  float v[OWN], sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int e = tid + 256 * i;
    v[i] = 0.0f;
    if (e >= HIDDEN) continue;
    v[i] = static_cast<float>(x[start + e]);
    if (ADDS) {
      v[i] = __fmaf_rn(static_cast<float>(block[($int64)row * HIDDEN + e]), gate, v[i]);
      const InT rounded = static_cast<InT>(v[i]);
      total[start + e] = rounded;
      v[i] = static_cast<float>(rounded);
    }
    sum = __fmaf_rn(v[i], v[i], sum);
  }
  #pragma unroll
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < 8; ++i) sum += sums[i];
  const float scale = rsqrtf(sum / HIDDEN + eps[0]);
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int e = tid + 256 * i;
    if (e < HIDDEN) {
      normed[start + e] = static_cast<InT>(v[i] * scale * static_cast<float>(weight[stream * HIDDEN + e]));
    }
  }
"""


@cache
def _kernel(language: type[SourceKernel]) -> SourceKernel:
    inputs = ["x", "block", "gates", "weight", "eps"]
    return language("stream_norm", inputs, ["total", "normed"], NORM_SOURCE)


def add_and_norm(
    language: type[SourceKernel],
    x: mx.array,
    added: Sequence[mx.array] | None,
    weight: mx.array,
    eps: mx.array,
    sizes: tuple[int, int] = (1, 0),
) -> tuple[mx.array, mx.array]:
    """Return the streams `x [rows, width]` with a block's output added, and their norm.

    `added` are the output `[rows, hidden]`, and perhaps an array of the logits of its gates, which follow some columns.
    `sizes` are the number of streams and that of these columns.
    """
    added, (streams, columns) = added or (), sizes
    total, normed = _kernel(language)(
        [x, *[*added, x, x][:2], weight, eps],
        blocks=(x.shape[0] * streams, 1, 1),
        template=[
            ("InT", x.dtype),
            ("ADDS", len(added)),
            ("STREAMS", streams),
            ("HIDDEN", x.shape[1] // streams),
            ("FIRST", columns),
        ],
        shapes=[x.shape if added else (1,), x.shape],
        dtypes=[x.dtype] * 2,
    )
    return total if added else x, normed
