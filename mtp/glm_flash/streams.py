"""Manifold-constrained hyper-connections (mHC): how a block reads the residual streams, and how they go on after it.

On a GPU two kernels compute one, the same text for NVIDIA and Apple, in place of some ninety launches of Sinkhorn's
algorithm: all 24 products of the streams beside the sum before them, and the mixing matrix with the block's input.
The order of every sum is fixed, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx

from mtp.glm_flash.modules import DecoderLayer
from mtp.layers.source_kernel import THREADS, SourceKernel

STREAMS = 4
"""Residual streams; the kernels support only this number."""

ROWS = 8
"""Rows of a prompt for which a block of threads reads the weights once."""

SPREAD_SOURCE = r"""
  // A thread has one column of all streams. It adds the block's output to them, and multiplies them with the weights.
  constexpr int OUTS = (2 + N) * N, MIXED = N + N * N;
  const int tid = threadIdx.x, e = blockIdx.x * 256 + tid;
  const bool inside = e < HIDDEN;
  $array float sums[8][OUTS + 1];
  float w[OUTS][N];
  if (PRODUCTS) {
    #pragma unroll
    for (int o = 0; o < OUTS; ++o) {
      #pragma unroll
      for (int j = 0; j < N; ++j) w[o][j] = inside ? fn[(o * N + j) * HIDDEN + e] : 0.0f;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const int row = blockIdx.y * ROWS + r;
    if (row >= x_shape[0]) break;
    float v[N];
    #pragma unroll
    for (int j = 0; j < N; ++j) v[j] = inside ? static_cast<float>(x[(($int64)row * N + j) * HIDDEN + e]) : 0.0f;
    if (ADDS && inside) {
      const float y = static_cast<float>(block[($int64)row * HIDDEN + e]);
      float sum[N];
      #pragma unroll
      for (int j = 0; j < N; ++j) {
        sum[j] = __fmul_rn(mixed[row * MIXED + j], y);
        #pragma unroll
        for (int i = 0; i < N; ++i) sum[j] = __fmaf_rn(mixed[row * MIXED + N + i * N + j], v[i], sum[j]);
      }
      #pragma unroll
      for (int j = 0; j < N; ++j) {
        const InT rounded = static_cast<InT>(sum[j]);
        total[(($int64)row * N + j) * HIDDEN + e] = rounded;
        v[j] = static_cast<float>(rounded);
      }
    }
    if (!PRODUCTS) continue;
    #pragma unroll
    for (int o = 0; o <= OUTS; ++o) {
      float sum = 0.0f;
      #pragma unroll
      for (int j = 0; j < N; ++j) sum = __fmaf_rn(o < OUTS ? w[o % OUTS][j] : v[j], v[j], sum);
      #pragma unroll
      for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
      if ((tid & 31) == 0) sums[tid >> 5][o] = sum;
    }
    __syncthreads();
    if (tid <= OUTS) {
      float sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < 8; ++i) sum += sums[i][tid];
      products[(row * CHUNKS + blockIdx.x) * (OUTS + 1) + tid] = sum;
    }
    __syncthreads();
  }
"""
"""The last of the products is the sum of the squares."""

READ_SOURCE = r"""
  // A block of threads has one row. Its first warp computes the gates and the matrix, an element in each lane.
  constexpr int OUTS = (2 + N) * N, MIXED = N + N * N, OWN = (HIDDEN + 255) / 256;
  const int tid = threadIdx.x, row = blockIdx.x;
  $array float logits[OUTS];
  $array float reads[N];
  $array float sums[8];
  if (tid < OUTS) {
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < CHUNKS; ++c) {
      const int from = (row * CHUNKS + c) * (OUTS + 1);
      sum += products[from + tid];
      squares += products[from + OUTS];
    }
    logits[tid] = __fmaf_rn(__fmul_rn(sum, rsqrtf(squares / (N * HIDDEN) + sizes[0])), scales[tid], base[tid]);
  }
  __syncthreads();
  if (tid < 32) {
    if (tid < 2 * N) {
      const float gate = 1.0f / (1.0f + expf(-logits[tid]));
      if (tid < N) reads[tid] = gate + sizes[1]; else mixed[row * MIXED + tid - N] = 2.0f * gate;
    }
    float value = logits[2 * N + tid % (N * N)];
    float highest = max(value, __shfl_xor_sync(0xffffffff, value, 1));
    highest = max(highest, __shfl_xor_sync(0xffffffff, highest, 2));
    value = expf(value - highest);
    float sum = value + __shfl_xor_sync(0xffffffff, value, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    value = value / sum + sizes[1];
    for (int step = 0; step < 2 * ROUNDS - 1; ++step) {
      const int near = step % 2 ? 1 : N;
      sum = value + __shfl_xor_sync(0xffffffff, value, near);
      sum += __shfl_xor_sync(0xffffffff, sum, 2 * near);
      value /= sum + sizes[1];
    }
    if (tid < N * N) mixed[row * MIXED + N + tid] = value;
  }
  __syncthreads();
  float v[OWN], sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int e = tid + 256 * i;
    v[i] = 0.0f;
    if (e >= HIDDEN) continue;
    #pragma unroll
    for (int j = 0; j < N; ++j) {
      v[i] = __fmaf_rn(reads[j], static_cast<float>(x[(($int64)row * N + j) * HIDDEN + e]), v[i]);
    }
    const InT rounded = static_cast<InT>(v[i]);
    v[i] = static_cast<float>(rounded);
    sum = __fmaf_rn(v[i], v[i], sum);
  }
  #pragma unroll
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < 8; ++i) sum += sums[i];
  const float scale = rsqrtf(sum / HIDDEN + sizes[0]);
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int e = tid + 256 * i;
    if (e < HIDDEN) out[($int64)row * HIDDEN + e] = static_cast<InT>(v[i] * scale * static_cast<float>(weight[e]));
  }
"""


@cache
def _kernels(language: type[SourceKernel]) -> tuple[SourceKernel, SourceKernel]:
    inputs = ["x", "products", "scales", "base", "weight", "sizes"]
    return (
        language("stream_spread", ["x", "block", "mixed", "fn"], ["total", "products"], SPREAD_SOURCE),
        language("stream_read", inputs, ["out", "mixed"], READ_SOURCE),
    )


class HyperConnection:
    """The connection of a layer's `block`, "attn" or "ffn", whose input has the norm `norm`."""

    language: type[SourceKernel] | None = None
    """The language of the kernels that replace MLX's operations."""

    def __init__(self, layer: DecoderLayer, block: str, norm: Any) -> None:
        fn, base, scale = (layer[f"hc_{block}_{name}"].astype(mx.float32) for name in ("fn", "base", "scale"))
        args = layer.args
        parts = [0] * args.streams + [1] * args.streams + [2] * args.streams**2
        self._fn, self._base, self._scales, self._norm = fn, base, scale[mx.array(parts)], norm
        self._streams, self._eps, self._mix_eps, self._rounds = args.streams, args.eps, args.mix_eps, args.rounds
        self._sizes = mx.array([args.eps, args.mix_eps])
        mx.eval(self._fn, self._base, self._scales, self._sizes)

    @property
    def kernel(self) -> tuple[str, str, str, int] | None:
        """See `Connection.kernel`."""
        width = self._streams * self._norm.weight.size
        known = "hyper_connections", "any heads", SPREAD_SOURCE + READ_SOURCE, width
        return known if self._streams == STREAMS else None

    def read(
        self, x: mx.array, block: mx.array | None = None, gates: Sequence[mx.array] = ()
    ) -> tuple[mx.array, mx.array, Sequence[mx.array]]:
        """See `Connection.read`."""
        if self.language is not None:
            x, products = self._run_spread(self.language, x, block, gates)
            return x, *self._run_read(self.language, x, products)
        x = x if block is None else self.spread(x, block, gates)
        n = self._streams
        normed = mx.fast.rms_norm(x.astype(mx.float32), None, self._eps)
        logits = normed @ self._fn.T * self._scales + self._base
        reads, opened = mx.sigmoid(logits[:, :n]) + self._mix_eps, 2 * mx.sigmoid(logits[:, n : 2 * n])
        matrix = _mixing(logits[:, 2 * n :].reshape(-1, n, n), self._mix_eps, self._rounds)
        apart = x.reshape(x.shape[0], n, -1)
        inputs = (reads[..., None] * apart).sum(axis=1)
        return x, self._norm(inputs.astype(x.dtype)), (opened.astype(x.dtype), matrix.astype(x.dtype))

    def spread(self, x: mx.array, block: mx.array, gates: Sequence[mx.array]) -> mx.array:
        """See `Connection.spread`."""
        if self.language is not None:
            return self._run_spread(self.language, x, block, gates, products=False)[0]
        opened, matrix = gates
        apart = x.reshape(x.shape[0], self._streams, -1)
        return (opened[..., None] * block[:, None] + matrix.swapaxes(-1, -2) @ apart).reshape(x.shape)

    def _run_spread(
        self,
        language: type[SourceKernel],
        x: mx.array,
        block: mx.array | None,
        gates: Sequence[mx.array],
        *,
        products: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """Return the streams, and the products of the 256 columns of each block of threads with the weights."""
        rows, hidden = x.shape[0], x.shape[1] // STREAMS
        chunks, alone = -(-hidden // THREADS), 1 if rows <= language.most_rows else ROWS
        template = [("InT", x.dtype), ("N", STREAMS), ("HIDDEN", hidden), ("CHUNKS", chunks), ("ROWS", alone)]
        total, found = _kernels(language)[0](
            [x, x if block is None else block, *(gates or [self._fn]), self._fn],
            blocks=(chunks, -(-rows // alone), 1),
            template=[*template, ("ADDS", int(block is not None)), ("PRODUCTS", int(products))],
            shapes=[(1,) if block is None else x.shape, (rows if products else 1, chunks, self._fn.shape[0] + 1)],
            dtypes=[x.dtype, mx.float32],
        )
        return x if block is None else total, found

    def _run_read(
        self, language: type[SourceKernel], x: mx.array, products: mx.array
    ) -> tuple[mx.array, Sequence[mx.array]]:
        rows, hidden = x.shape[0], x.shape[1] // STREAMS
        sizes = [("HIDDEN", hidden), ("CHUNKS", products.shape[1]), ("ROUNDS", self._rounds)]
        inputs, mixed = _kernels(language)[1](
            [x, products, self._scales, self._base, self._norm.weight, self._sizes],
            blocks=(rows, 1, 1),
            template=[("InT", x.dtype), ("N", STREAMS), *sizes],
            shapes=[(rows, hidden), (rows, STREAMS + STREAMS**2)],
            dtypes=[x.dtype, mx.float32],
        )
        return inputs, (mixed,)


@partial(mx.compile, shapeless=True)
def _mixing(logits: mx.array, eps: float, rounds: int) -> mx.array:
    """Return the softmax of `logits [rows, n, n]`, made doubly stochastic by Sinkhorn's algorithm."""
    matrix = mx.softmax(logits, axis=-1) + eps
    for step in range(2 * rounds - 1):
        matrix = matrix / (matrix.sum(axis=-1 if step % 2 else -2, keepdims=True) + eps)
    return matrix
