"""Mixtures of experts in fewer operations than mlx-lm's modules: fused products, and kernels for few rows on GPUs.

The kernels have the same text for NVIDIA and Apple. MLX's operations take about ten launches for few rows, which cost
more than the arithmetic; the kernels take three. A row's result does not depend on the rows beside it. The shared
expert counts as one more that every row chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import SparseMoeBlock

from mtp.device import this_device
from mtp.layers.layer import Picks
from mtp.layers.linear import FusedLinear, pad_outputs
from mtp.layers.source_kernel import THREADS, SourceKernel

SORTED_FROM = 64
"""Pairs of a row and an expert that are computed expert by expert. Fewer are not worth the sorting."""


def highest(logits: mx.array, count: int) -> mx.array:
    """Return the places of the `count` highest of each row; of equal ones the lower place, as the kernels do."""
    return mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count]


class OrderedExperts(SparseMoeBlock):
    """mlx-lm's experts, which choose the lower of two experts with equal logits, as the fused ones and the kernels."""

    @classmethod
    def of(cls, block: Any) -> Any:
        """Return `block` in this order; other modules as they are."""
        if type(block) is not SparseMoeBlock:
            return block
        own = cls.__new__(cls)
        nn.Module.__init__(own)
        own.__dict__.update(block.__dict__)
        dict.update(own, block)
        return own

    def __call__(self, x: mx.array) -> mx.array:
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        chosen = highest(gates, self.top_k)
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        routed = (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)
        return routed + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class FusedExperts(nn.Module):
    """The experts of a layer, whose gate and up projections are one. The router and the shared gate are one, too."""

    def __init__(self, count: int, chosen: int, products: Sequence[FusedLinear]) -> None:
        """Take the number of experts and how many a row chooses.

        `products` are the router's, gate and up of the experts, their down, and gate, up and down of the shared one.
        """
        super().__init__()
        self.count, self.chosen, self._products = count, chosen, tuple(products)
        self.router, self.gate_up, self.down, self.shared_gate_up, self.shared_down = products

    def __call__(self, x: mx.array) -> mx.array:
        """Return the sum of the chosen experts and the shared one for `x [rows, hidden]`."""
        routed = self.router(x)
        logits = routed[:, : self.count]
        chosen = highest(logits, self.chosen)
        # The softmax of the chosen logits is that of all logits, over its sum for the chosen ones.
        shares = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True)
        outputs = self._outputs(x, chosen)
        shared = self.shared_down(_halves_gated(self.shared_gate_up(x)))
        gate = routed[:, self.count : self.count + 1]
        return _added((shares[:, None] @ outputs)[:, 0], shared, gate)

    def _outputs(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Return the outputs `[rows, k, hidden]` of the experts `chosen [rows, k]`."""
        if chosen.size < SORTED_FROM:
            both = self.gate_up.gather(x[:, None, None], chosen)
            return self.down.gather(_halves_gated(both), chosen).squeeze(-2)
        tile = this_device().expert_tile
        tiles, experts, places = tiles_of(chosen.flatten(), self.count, tile)
        gated = _halves_gated(self.gate_up.gather(x[tiles // self.chosen], experts, is_sorted=True))
        found = self.down.gather(gated, experts, is_sorted=True)
        return found.reshape(-1, found.shape[-1])[places].reshape(*chosen.shape, -1)


def tiles_of(experts: mx.array, count: int, rows: int) -> tuple[mx.array, mx.array, mx.array]:
    """Put pairs of a row and an expert into tiles of `rows` pairs of one expert, in the order of the experts.

    Returns the pairs of the tiles `[tiles, rows]`, the experts of the tiles `[tiles]`, and the place of each pair of
    `experts [pairs]`. Free places hold pair 0. The number of tiles follows from the shapes alone, so that nothing waits
    for the GPU.
    """
    order = mx.argsort(experts)
    if rows == 1:
        return order[:, None], experts[order], mx.argsort(order)
    pairs = experts.size
    sizes = mx.zeros(count, mx.int32).at[experts].add(1)
    ends = mx.cumsum((sizes + rows - 1) // rows)
    # The first pair of an expert takes the first place of its first tile, and the others follow it.
    shift = (ends - (sizes + rows - 1) // rows) * rows - (mx.cumsum(sizes) - sizes)
    places = mx.argsort(order).astype(mx.int32) + shift[experts]
    tiles = min(pairs, pairs // rows + count)
    found = mx.zeros(tiles * rows, mx.int32)
    found[places] = mx.arange(pairs, dtype=mx.int32)
    owners = (ends <= mx.arange(tiles, dtype=mx.int32)[:, None]).sum(axis=-1)
    return found.reshape(tiles, rows), mx.minimum(owners, count - 1).astype(mx.uint32), places


def _halves_gated(both: mx.array) -> mx.array:
    return _gated(*mx.split(both, 2, axis=-1))


def fuse_experts(block: Any) -> Any:
    """Return mlx-lm's `SparseMoeBlock` fused. Other modules, and one with several formats, stay as they are."""
    if "switch_mlp" not in block or not block.norm_topk_prob:
        return block
    experts, shared = block.switch_mlp, block.shared_expert
    parts = [
        [block.gate, block.shared_expert_gate],
        [experts.gate_proj, experts.up_proj],
        [experts.down_proj],
        [shared.gate_proj, shared.up_proj],
        [shared.down_proj],
    ]
    if not all(map(FusedLinear.fits, parts)):
        return block
    pad_outputs(block.shared_expert_gate, block.num_experts)
    fused = [product for part in parts if (product := FusedLinear.of(part))]
    return FusedExperts(block.num_experts, block.top_k, fused)


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


@partial(mx.compile, shapeless=True)
def _added(experts: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    return experts + mx.sigmoid(gate) * shared


OUTPUTS = 2
"""Outputs of a warp, which share the inputs."""

BITS = 4

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
  const int lane = threadIdx.x & 31, first = (blockIdx.x * 8 + (threadIdx.x >> 5)) * OUTS;
  float v[16], total;
  auto load = [&](int unit) {
    total = 0.0f;
    #pragma unroll
    for (int i = 0; i < 16; ++i) total += v[i] = static_cast<float>(held[i * UNITS + unit]);
  };
  auto product = [&](const $device uint2* words, const $device InT* scales, const $device InT* biases) -> float {
    const uint2 w = *words;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned part = i < 8 ? w.x : w.y, at = 4 * (i & 7);
      const unsigned bits = (at < 16 ? part << (16 - at) : part >> (at - 16)) & 0x000f0000u;
      sum = __fmaf_rn(__uint_as_float(0x43000000u | bits), v[i], sum);
    }
    const float scale = static_cast<float>(*scales);
    return __fmaf_rn(scale, sum, __fmaf_rn(-128.0f, scale, static_cast<float>(*biases)) * total);
  };
  auto sum_of = [&](float own, int high, int low) -> float {
    #pragma unroll
    for (int m = high; m >= low; m >>= 1) own += __shfl_xor_sync(0xffffffff, own, m);
    return own;
  };
"""
"""The product of inputs in `held` with rows of weights, for a warp that computes OUTS outputs from `first` on."""

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
  if (first >= INNER) return;
  const bool all = chosen[pair] == EXPERTS;
  const $int64 start = all ? 0 : ($int64)chosen[pair] * 2 * INNER;
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
      sums[o] += product(words + n * UNITS + unit, scale + group, bias + group);
    }
  }
  #pragma unroll
  for (int o = 0; o < OUTS; ++o) {
    const float gate = sum_of(sums[2 * o], 16, 1), up = sum_of(sums[2 * o + 1], 16, 1);
    if (lane > 0 || first + o >= INNER) continue;
    out[($int64)pair * INNER + first + o] = static_cast<InT>(gate / (1.0f + expf(-gate)) * up);
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
    held[e % 16 * UNITS + e / 16] = gated[($int64)row * (TOP + 1) * INNER + e];
  }
  if (tid <= TOP) {
    share[tid] = shares[row * (TOP + 1) + tid];
    expert[tid] = chosen[row * (TOP + 1) + tid];
  }
  __syncthreads();
"""
    + PRODUCT
    + r"""
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
      const float found = product(words + n * OWN, scale + n * GROUPS, bias + n * GROUPS);
      sums[o] = __fmaf_rn(share[j], found, sums[o]);
    }
  }
  #pragma unroll
  for (int o = 0; o < OUTS; ++o) {
    const float y = sum_of(sums[o], 16, 1);
    if (lane == 0 && first + o < HIDDEN) out[($int64)row * HIDDEN + first + o] = static_cast<InT>(y);
  }
"""
)

WEIGHTS = ["w", "scales", "biases", "all_w", "all_scales", "all_biases"]


@cache
def _kernels(language: type[SourceKernel]) -> tuple[SourceKernel, SourceKernel, SourceKernel]:
    """Return the choice of experts, gate and up with their gating, and the weighted down. All layers share them."""
    return (
        language("expert_choice", ["logits"], ["chosen", "shares"], CHOOSE_SOURCE),
        language("expert_gate_up", ["x", "chosen", *WEIGHTS], ["out"], GATE_UP_SOURCE),
        language("expert_down", ["gated", "chosen", "shares", *WEIGHTS], ["out"], DOWN_SOURCE),
    )


def has_row_kernels(block: FusedExperts, dtype: mx.Dtype) -> bool:
    """Return whether the kernels compute `block` for rows of `dtype`: affine weights of 4 bits in one format."""
    products = block.gate_up, block.down, block.shared_gate_up, block.shared_down
    experts, hidden, words = block.down.weights[0].shape
    return (
        {(product.format, product.dtype) for product in products} == {(block.down.format, dtype)}
        and (block.down.format.bits, block.down.format.mode) == (BITS, "affine")
        and block.shared_down.weights[0].shape == (hidden, words)
        and hidden % 16 == words * 32 // BITS % 16 == experts % 32 == 0
        and block.chosen < 32
    )


class RowExperts(FusedExperts):
    """Fused experts of which kernels compute few rows, each of which reads its experts by itself."""

    def __init__(self, block: FusedExperts, language: type[SourceKernel]) -> None:
        super().__init__(block.count, block.chosen, block._products)
        self._language = language

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[0] > self._language.most_rows:
            return super().__call__(x)
        choose, gate_up, down = _kernels(self._language)
        rows, places = x.shape[0], self.chosen + 1
        hidden, words = self.down.weights[0].shape[1:]
        inner, outputs = words * 32 // BITS, OUTPUTS * THREADS // 32
        template = [("InT", x.dtype), ("EXPERTS", self.count), ("TOP", self.chosen)]
        template += [("HIDDEN", hidden), ("INNER", inner), ("OUTS", OUTPUTS)]
        template.append(("GROUP", self.down.format.group_size))
        chosen, shares = choose(
            [self.router.multiply_alone(x, self._language.alone_rows)],
            blocks=(-(-rows * 32 // THREADS), 1, 1),
            template=template[:3],
            shapes=[(rows, places)] * 2,
            dtypes=[mx.int32, mx.float32],
        )
        gated = gate_up(
            [x, chosen, *self.gate_up.weights, *self.shared_gate_up.weights],
            blocks=(-(-inner // outputs), rows * places, 1),
            template=template,
            shapes=[(rows * places, inner)],
            dtypes=[x.dtype],
        )
        return down(
            [*gated, chosen, shares, *self.down.weights, *self.shared_down.weights],
            blocks=(-(-hidden // outputs), rows, 1),
            template=template,
            shapes=[x.shape],
            dtypes=[x.dtype],
        )[0]


def row_experts(block: Any, dtype: mx.Dtype, language: type[SourceKernel], picks: Picks) -> Any:
    """Return fused experts with kernels in `language`, or `block` itself where they do not compute it."""
    if type(block) is not FusedExperts or not has_row_kernels(block, dtype):
        return block
    own, hidden = RowExperts(block, language), block.down.weights[0].shape[1]
    shapes, source = f"{block.count} experts", CHOOSE_SOURCE + GATE_UP_SOURCE + DOWN_SOURCE
    return own if picks("expert_rows", shapes, source, hidden, own, block) else block
