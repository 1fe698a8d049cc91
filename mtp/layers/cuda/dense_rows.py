"""Products of rows with half-precision weights on the tensor cores of an NVIDIA GPU, each row alone.

The libraries that MLX calls choose a kernel by the number of rows. This kernel has one order of sums for any number.
It reads the weights once for up to 32 rows, so it is made for decoding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.cuda.packed_linear import HEADER, MOST_ROWS, MULTIPLY_CHUNKS
from mtp.layers.source_kernel import HALF_TYPES, CudaKernel

CHUNK = 64
"""Inputs that a warp multiplies between two loads. The number of inputs must be a multiple of it."""

TILE = 16

MANY_OUTPUTS = 8192
"""Outputs from which a block computes two tiles of them, which share their inputs. Fewer blocks would idle a GPU."""

SOURCE = (
    r"""
  constexpr int WARPS = 8;
  const int K = x_shape[1];
  const int M = x_shape[0];
  const int N = w_shape[0];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int chunks = K / 64;
  const int first = blockIdx.x * PARTS * 16;

  // A lane holds 16 inputs of outputs g and g + 8 of each tile, and the same inputs of row g of each 8 rows.
  const uint4* w_rows[PARTS][2];
  #pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const long long n = min(first + p * 16 + h * 8 + g, N - 1);
      w_rows[p][h] = reinterpret_cast<const uint4*>(w + n * K + t * 16);
    }
  }
  const uint4* x_rows[TILES];
  #pragma unroll
  for (int m = 0; m < TILES; ++m) {
    x_rows[m] = reinterpret_cast<const uint4*>(x + (long long)min(m * 8 + g, M - 1) * K + t * 16);
  }
  float acc[PARTS][TILES][4] = {};
  struct Chunk { uint4 w[PARTS][2][2]; };
  auto load = [&](Chunk& c, int chunk) {
    if (chunk >= chunks) return;
    #pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        c.w[p][h][0] = __ldcs(w_rows[p][h] + chunk * 8);
        c.w[p][h][1] = __ldcs(w_rows[p][h] + chunk * 8 + 1);
      }
    }
  };
  auto multiply = [&](const Chunk& c, int chunk) {
    if (chunk >= chunks) return;
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 b = __ldg(x_rows[m] + chunk * 8 + half);
        #pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          const uint4 low = c.w[p][0][half], high = c.w[p][1][half];
          Tensor<InT>::mma(acc[p][m], low.x, high.x, low.y, high.y, b.x, b.y);
          Tensor<InT>::mma(acc[p][m], low.z, high.z, low.w, high.w, b.z, b.w);
        }
      }
    }
  };
"""
    + MULTIPLY_CHUNKS
    + r"""  for (int j = tid; j < TILES * 8 * 16 * PARTS; j += WARPS * 32) {
    const int m = j / (16 * PARTS), p = j / 16 % PARTS, r = j % 16;
    const int n = first + p * 16 + r;
    if (m >= M || n >= N) continue;
    float y = 0.0f;
    #pragma unroll
    for (int v = 0; v < WARPS; ++v) y += partial[p][v][m][r];
    out[(long long)m * N + n] = static_cast<InT>(y);
  }
"""
)

_multiply = CudaKernel("dense_rows", ["x", "w"], ["out"], SOURCE, HEADER)


def multiply_dense_rows(x: mx.array, w: mx.array) -> mx.array:
    """Return `x [rows, K]` times `w [N, K]`, for up to `MOST_ROWS` rows: `[rows, N]`."""
    rows, outputs = x.shape[0], w.shape[0]
    parts = 2 if outputs >= MANY_OUTPUTS else 1
    return _multiply(
        [x, w],
        blocks=(-(-outputs // (TILE * parts)), 1, 1),
        template=[
            ("InT", x.dtype),
            ("TILES", 1 if rows <= 8 else 2 if rows <= 16 else 4),
            ("PARTS", parts),
            ("AHEAD", 2),
        ],
        shapes=[(rows, outputs)],
        dtypes=[x.dtype],
    )[0]


class DenseRows(nn.Module):
    """A linear layer without bias whose rows have the same bits beside any other rows."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    @staticmethod
    def computes(module: Any) -> bool:
        """Return whether the kernel multiplies with the weights of a linear layer or an embedding."""
        return (
            type(module) in (nn.Linear, nn.Embedding)
            and "bias" not in module
            and module.weight.dtype in HALF_TYPES
            and module.weight.shape[1] % CHUNK == 0
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x [rows, K]` times the weights: `[rows, N]`."""
        if x.shape[0] <= MOST_ROWS:
            return multiply_dense_rows(x, self.weight)
        starts = range(0, x.shape[0], MOST_ROWS)
        return mx.concatenate([multiply_dense_rows(x[start : start + MOST_ROWS], self.weight) for start in starts])
