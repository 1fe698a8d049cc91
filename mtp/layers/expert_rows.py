"""Experts of few rows in three launches on a GPU, the same text for NVIDIA and Apple.

MLX's operations take about ten launches, which cost more than the arithmetic. A row's result does not depend on the
rows beside it. The shared expert counts as one more that every row chooses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mtp.layers.experts import JoinedExperts
from mtp.layers.layer import Picks
from mtp.layers.source_kernel import THREADS, SourceKernel

OUTPUTS = 2
"""Outputs of a warp, which share the inputs."""

BITS = 4
UNIT = 16
"""Inputs that a thread multiplies at once."""

CHOOSE_SOURCE = r"""
  // A warp chooses for a row: it searches the highest logit TOP times.
  const int lane = threadIdx.x & 31;
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= logits_shape[0]) return;
  const $device InT* from = logits + ($int64)row * logits_shape[1];
  constexpr int OWN = EXPERTS / 32;
  const float LOWEST = __uint_as_float(0xff800000u);  // minus infinity
  float values[OWN];
  #pragma unroll
  for (int i = 0; i < OWN; ++i) values[i] = static_cast<float>(from[lane + 32 * i]);
  float highest = 0.0f, share = 0.0f;
  int expert = EXPERTS;
  for (int j = 0; j < TOP; ++j) {
    float best = LOWEST;
    int place = lane;
    #pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (values[i] > best) { best = values[i]; place = lane + 32 * i; }
    }
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
      const float other = __shfl_xor_sync(0xffffffff, best, m);
      const int other_place = __shfl_xor_sync(0xffffffff, place, m);
      if (other > best || (other == best && other_place < place)) { best = other; place = other_place; }
    }
    #pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (place == lane + 32 * i) values[i] = LOWEST;
    }
    if (j == 0) highest = best;
    if (lane == j) { share = expf(best - highest); expert = place; }
  }
  float sum = share;
  #pragma unroll
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
  if (lane > TOP) return;
  const float gate = static_cast<float>(from[EXPERTS]);
  chosen[row * (TOP + 1) + lane] = expert;
  shares[row * (TOP + 1) + lane] = lane < TOP ? share / sum : 1.0f / (1.0f + expf(-gate));
"""

PRODUCT = r"""
  // The inputs of a thread, and their product with 16 weights: nibble q in these bits of a float is 128 + q.
  float v[16], total;
  auto load = [&](int unit) {
    total = 0.0f;
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
      v[i] = static_cast<float>(held[i * UNITS + unit]);
      total += v[i];
    }
  };
  auto product = [&](const $device uint2* words, float scale, float bias) -> float {
    const uint2 w = *words;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned low = i < 4 ? w.x << (16 - 4 * i) : w.x >> (4 * i - 16);
      sum = __fmaf_rn(__uint_as_float(0x43000000u | (low & 0x000f0000u)), v[i], sum);
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned high = i < 4 ? w.y << (16 - 4 * i) : w.y >> (4 * i - 16);
      sum = __fmaf_rn(__uint_as_float(0x43000000u | (high & 0x000f0000u)), v[8 + i], sum);
    }
    return __fmaf_rn(scale, sum, __fmaf_rn(-128.0f, scale, bias) * total);
  };
"""

GATE_UP_SOURCE = (
    r"""
  constexpr int UNITS = HIDDEN / 16, GROUPS = HIDDEN / GROUP;
  $array InT held[HIDDEN];
  const int pair = blockIdx.y;
  for (int e = threadIdx.x; e < HIDDEN; e += 256) {
    held[e % 16 * UNITS + e / 16] = x[($int64)(pair / (TOP + 1)) * HIDDEN + e];
  }
  __syncthreads();
"""
    + PRODUCT
    + r"""
  const int lane = threadIdx.x & 31;
  const int first = (blockIdx.x * 8 + (threadIdx.x >> 5)) * OUTS;
  if (first >= INNER) return;
  const int expert = chosen[pair];
  const bool all = expert == EXPERTS;
  const $int64 start = all ? 0 : ($int64)expert * 2 * INNER;
  const $device uint2* words = reinterpret_cast<const $device uint2*>(all ? all_w : w) + start * UNITS;
  const $device InT* scale = (all ? all_scales : scales) + start * GROUPS;
  const $device InT* bias = (all ? all_biases : biases) + start * GROUPS;
  float sums[2 * OUTS] = {};
  for (int unit = lane; unit < UNITS; unit += 32) {
    load(unit);
    #pragma unroll
    for (int o = 0; o < 2 * OUTS; ++o) {
      const int n = (o & 1) * INNER + min(first + (o >> 1), INNER - 1);
      const int group = n * GROUPS + unit * 16 / GROUP;
      sums[o] += product(words + n * UNITS + unit, static_cast<float>(scale[group]), static_cast<float>(bias[group]));
    }
  }
  #pragma unroll
  for (int o = 0; o < 2 * OUTS; ++o) {
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) sums[o] += __shfl_xor_sync(0xffffffff, sums[o], m);
  }
  #pragma unroll
  for (int o = 0; o < OUTS; ++o) {
    if (lane == 0 && first + o < INNER) {
      const float y = sums[2 * o] / (1.0f + expf(-sums[2 * o])) * sums[2 * o + 1];
      out[($int64)pair * INNER + first + o] = static_cast<InT>(y);
    }
  }
"""
)

DOWN_SOURCE = (
    r"""
  constexpr int OWN = INNER / 16, UNITS = (TOP + 1) * OWN, GROUPS = INNER / GROUP;
  $array InT held[(TOP + 1) * INNER];
  $array float share[TOP + 1];
  $array int expert[TOP + 1];
  const int row = blockIdx.y, tid = threadIdx.x;
  for (int e = tid; e < (TOP + 1) * INNER; e += 256) {
    held[e % 16 * UNITS + e / 16] = y[($int64)row * (TOP + 1) * INNER + e];
  }
  if (tid <= TOP) {
    share[tid] = shares[row * (TOP + 1) + tid];
    expert[tid] = chosen[row * (TOP + 1) + tid];
  }
  __syncthreads();
"""
    + PRODUCT
    + r"""
  const int lane = tid & 31;
  const int first = (blockIdx.x * 8 + (tid >> 5)) * OUTS;
  if (first >= HIDDEN) return;
  float sums[OUTS] = {};
  #pragma unroll 4
  for (int unit = lane; unit < UNITS; unit += 32) {
    load(unit);
    const int j = unit / OWN, place = unit % OWN;
    const bool all = j == TOP;
    const $int64 start = all ? 0 : ($int64)expert[j] * HIDDEN;
    const $device uint2* words = reinterpret_cast<const $device uint2*>(all ? all_w : w) + start * OWN + place;
    const $device InT* scale = (all ? all_scales : scales) + start * GROUPS + place * 16 / GROUP;
    const $device InT* bias = (all ? all_biases : biases) + start * GROUPS + place * 16 / GROUP;
    #pragma unroll
    for (int o = 0; o < OUTS; ++o) {
      const int n = min(first + o, HIDDEN - 1);
      const float found = product(
          words + n * OWN, static_cast<float>(scale[n * GROUPS]), static_cast<float>(bias[n * GROUPS]));
      sums[o] = __fmaf_rn(share[j], found, sums[o]);
    }
  }
  #pragma unroll
  for (int o = 0; o < OUTS; ++o) {
    #pragma unroll
    for (int m = 16; m > 0; m >>= 1) sums[o] += __shfl_xor_sync(0xffffffff, sums[o], m);
    if (lane == 0 && first + o < HIDDEN) out[($int64)row * HIDDEN + first + o] = static_cast<InT>(sums[o]);
  }
"""
)

WEIGHTS = ["w", "scales", "biases", "all_w", "all_scales", "all_biases"]


class ExpertKernels:
    """The three kernels in `language`: the choice of experts, gate and up with their gating, and the weighted down."""

    def __init__(self, language: type[SourceKernel]) -> None:
        self._choose = language("expert_choice", ["logits"], ["chosen", "shares"], CHOOSE_SOURCE)
        inputs = ["x", "chosen", *WEIGHTS]
        self._gate_up = language("expert_gate_up", inputs, ["out"], GATE_UP_SOURCE)
        self._down = language(
            "expert_down", ["y", "chosen", "shares", *WEIGHTS], ["out"], DOWN_SOURCE
        )

    def run(self, block: JoinedExperts, x: mx.array, logits: mx.array) -> mx.array:
        """Return the outputs `[rows, hidden]` of a block that `computes` allows.

        `logits [rows, any]` are those of its experts, and behind them that of the shared one.
        """
        rows, (hidden, inner, top) = x.shape[0], _sizes(block)
        sizes: list[tuple[str, Any]] = [("InT", x.dtype), ("EXPERTS", block.count), ("TOP", top)]
        chosen, shares = self._choose(
            [logits],
            blocks=(-(-rows * 32 // THREADS), 1, 1),
            template=sizes,
            shapes=[(rows, top + 1)] * 2,
            dtypes=[mx.int32, mx.float32],
        )
        group = block.gate_up.format.group_size
        sizes += [("HIDDEN", hidden), ("INNER", inner), ("GROUP", group), ("OUTS", OUTPUTS)]
        outputs = OUTPUTS * THREADS // 32
        gated = self._gate_up(
            [x, chosen, *block.gate_up.weights, *block.shared_gate_up.weights],
            blocks=(-(-inner // outputs), rows * (top + 1), 1),
            template=sizes,
            shapes=[(rows * (top + 1), inner)],
            dtypes=[x.dtype],
        )[0]
        return self._down(
            [gated, chosen, shares, *block.down.weights, *block.shared_down.weights],
            blocks=(-(-hidden // outputs), rows, 1),
            template=sizes,
            shapes=[x.shape],
            dtypes=[x.dtype],
        )[0]


def _sizes(block: JoinedExperts) -> tuple[int, int, int]:
    """Return the hidden size, the inner size of an expert, and how many a row chooses."""
    hidden, words = block.down.weights[0].shape[1:]
    return hidden, words * 32 // BITS, block.chosen


def computes(block: JoinedExperts, dtype: mx.Dtype) -> bool:
    """Return whether the kernels compute `block` for rows of `dtype`: affine weights of 4 bits in one format."""
    products = (block.gate_up, block.down, block.shared_gate_up, block.shared_down)
    if {product.format for product in products} != {block.down.format} or len(
        {product.dtype for product in products} | {dtype}
    ) != 1:
        return False
    hidden, inner, top = _sizes(block)
    return (
        (block.down.format.bits, block.down.format.mode) == (BITS, "affine")
        and block.shared_down.weights[0].shape == block.down.weights[0].shape[1:]
        and hidden % UNIT == inner % UNIT == block.count % 32 == 0
        and top < 32
    )


class RowExperts(JoinedExperts):
    """Joined experts of which kernels compute few rows, each of which reads its experts by itself."""

    def __init__(self, block: JoinedExperts, language: type[SourceKernel]) -> None:
        super().__init__(block.count, block.chosen, block._products)
        self._kernels, self._most_rows = expert_kernels(language), language.most_rows

    def __call__(self, x: mx.array) -> mx.array:
        """See `JoinedExperts`."""
        if x.shape[0] > self._most_rows:
            return super().__call__(x)
        return self._kernels.run(self, x, self.router(x))


@cache
def expert_kernels(language: type[SourceKernel]) -> ExpertKernels:
    """Return the kernels in `language`. All layers share them."""
    return ExpertKernels(language)


def row_experts(block: Any, dtype: mx.Dtype, language: type[SourceKernel], picks: Picks) -> Any:
    """Return joined experts with kernels in `language`, or `block` itself where they do not compute it."""
    if type(block) is not JoinedExperts or not computes(block, dtype):
        return block
    own, hidden = RowExperts(block, language), block.down.weights[0].shape[1]
    shapes, source = f"{block.count} experts", CHOOSE_SOURCE + GATE_UP_SOURCE + DOWN_SOURCE
    return own if picks("expert_rows", shapes, source, hidden, own, block) else block
