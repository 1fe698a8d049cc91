"""Sums and norms of few rows in one launch on a GPU, the same text for NVIDIA and Apple.

Rows have residual streams, one or several. The mean of several after their gated mixer is a launch, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mtp.layers.expert_rows import OUTPUTS, PRODUCT
from mtp.layers.linear import JoinedLinear
from mtp.layers.source_kernel import THREADS, SourceKernel

NORM_SOURCE = r"""
  // A block of threads computes a stream of a row: it adds the output of a layer's block, and normalizes the sum.
  const int tid = threadIdx.x, row = blockIdx.x / STREAMS, stream = blockIdx.x % STREAMS;
  const $int64 start = ($int64)blockIdx.x * HIDDEN;
  $array float sums[8];
  float gate = 1.0f;
  if (ADDS == 2) {
    const float logit = static_cast<float>(gates[($int64)row * gates_shape[1] + RANK + stream]);
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

MEAN_SOURCE = (
    r"""
  constexpr int UNITS = RANK / 16, GROUPS = RANK / GROUP;
  $array InT held[RANK];
  const int row = blockIdx.y, tid = threadIdx.x;
  for (int e = tid; e < RANK; e += 256) {
    const float value = static_cast<float>(both[($int64)row * both_shape[1] + e]) / STREAMS;
    held[e % 16 * UNITS + e / 16] = static_cast<InT>(value / (1.0f + expf(-value)));
  }
  __syncthreads();
"""
    + PRODUCT
    + r"""
  // The lanes of a warp are divided among the streams.
  constexpr int LANES = 32 / STREAMS;
  const int stream = lane / LANES;
  if (first >= HIDDEN) return;
  const $device uint2* words = reinterpret_cast<const $device uint2*>(w);
  float sums[OUTS] = {};
  for (int unit = lane % LANES; unit < UNITS; unit += LANES) {
    load(unit);
    #pragma unroll
    for (int o = 0; o < OUTS; ++o) {
      const int n = stream * HIDDEN + min(first + o, HIDDEN - 1);
      const int group = n * GROUPS + unit * 16 / GROUP;
      sums[o] += product(words + n * UNITS + unit, scales + group, biases + group);
    }
  }
  #pragma unroll
  for (int o = 0; o < OUTS; ++o) {
    const int h = min(first + o, HIDDEN - 1);
    const float value = static_cast<float>(normed[(($int64)row * STREAMS + stream) * HIDDEN + h]);
    const float y = sum_of(value / (1.0f + expf(-sum_of(sums[o], LANES / 2, 1))), 16, LANES);
    if (lane == 0 && first + o < HIDDEN) out[($int64)row * HIDDEN + h] = static_cast<InT>(y / STREAMS);
  }
"""
)


class StreamKernels:
    """The two kernels in `language`, for streams in any number and mixers of any rank. All layers share them."""

    def __init__(self, language: type[SourceKernel]) -> None:
        self.most_rows = language.most_rows
        inputs = ["x", "block", "gates", "weight", "eps"]
        self._norm = language("stream_norm", inputs, ["total", "normed"], NORM_SOURCE)
        inputs = ["both", "normed", "w", "scales", "biases"]
        self._mean = language("stream_mean", inputs, ["out"], MEAN_SOURCE)

    def norm(
        self,
        x: mx.array,
        added: Sequence[mx.array] | None,
        weight: mx.array,
        eps: mx.array,
        sizes: tuple[int, int],
    ) -> tuple[mx.array, mx.array]:
        """Return the streams `x [rows, width]` with a block's output added, and their norm.

        `added` are the output `[rows, hidden]`, and perhaps an array whose columns from the rank on are the logits of
        its gates. `sizes` are the number of streams and the rank.
        """
        added = added or ()
        total, normed = self._norm(
            [x, *[*added, x, x][:2], weight, eps],
            blocks=(x.shape[0] * sizes[0], 1, 1),
            template=[("ADDS", len(added)), *_template(x, sizes)],
            shapes=[x.shape if added else (1,), x.shape],
            dtypes=[x.dtype] * 2,
        )
        return total if added else x, normed

    def mean(
        self, both: mx.array, normed: mx.array, up: JoinedLinear, sizes: tuple[int, int]
    ) -> mx.array:
        """Return the mix `[rows, hidden]` of the streams `normed`, of the first columns of `both`."""
        rows, hidden = normed.shape[0], normed.shape[1] // sizes[0]
        return self._mean(
            [both, normed, *up.weights],
            blocks=(-(-hidden // (OUTPUTS * THREADS // 32)), rows, 1),
            template=[
                *_template(normed, sizes),
                ("GROUP", up.format.group_size),
                ("OUTS", OUTPUTS),
            ],
            shapes=[(rows, hidden)],
            dtypes=[normed.dtype],
        )[0]


def _template(x: mx.array, sizes: tuple[int, int]) -> list[tuple[str, Any]]:
    streams, rank = sizes
    hidden = x.shape[1] // streams
    return [("InT", x.dtype), ("STREAMS", streams), ("HIDDEN", hidden), ("RANK", rank)]


stream_kernels = cache(StreamKernels)
