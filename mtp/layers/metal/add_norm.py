"""A sum and its norm in one launch: the residual before the MLP of a layer."""

from __future__ import annotations

import mlx.core as mx

from mtp.layers.metal.kernel import MetalKernel

THREADS = 512
"""Threads of a block, which computes a row."""

SOURCE = r"""
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int width = x_shape[1];
  const $int64 start = ($int64)blockIdx.x * width;
  $array float sums[16];
  float sum = 0.0f;
  for (int i = tid; i < width; i += 512) {
    const InT value = static_cast<InT>(static_cast<float>(x[start + i]) + static_cast<float>(y[start + i]));
    total[start + i] = value;
    sum = __fmaf_rn(static_cast<float>(value), static_cast<float>(value), sum);
  }
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  float all = 0.0f;
  for (int i = 0; i < 16; ++i) all += sums[i];
  const float scale = rsqrtf(all / width + eps[0]);
  for (int i = tid; i < width; i += 512) {
    const float value = static_cast<float>(total[start + i]) * scale;
    normed[start + i] = static_cast<InT>(value * static_cast<float>(weight[i]));
  }
"""

_kernel = MetalKernel("residual_norm", ["x", "y", "weight", "eps"], ["total", "normed"], SOURCE)


def add_norm(
    x: mx.array, y: mx.array, weight: mx.array, eps: float, own: bool
) -> tuple[mx.array, mx.array]:
    """Return `x + y [rows, hidden]`, and its norm. `own` takes the kernel if all arrays have one type."""
    if not own or not x.dtype == y.dtype == weight.dtype:
        x = x + y
        return x, mx.fast.rms_norm(x, weight, eps)
    total, normed = _kernel(
        [x, y, weight, mx.array([eps])],
        blocks=(x.shape[0], 1, 1),
        threads=THREADS,
        template=[("InT", x.dtype)],
        shapes=[x.shape, x.shape],
        dtypes=[x.dtype, x.dtype],
    )
    return total, normed
