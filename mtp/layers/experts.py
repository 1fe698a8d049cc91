"""Mixtures of experts in fewer operations than mlx-lm's modules: fused products, and kernels for few rows on GPUs.

The kernels have the same text for NVIDIA and Apple. MLX's operations take about ten launches for few rows, which cost
more than the arithmetic; the kernels take three. A row's result does not depend on the rows beside it. The shared
expert counts as one more that every row chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import SparseMoeBlock

from mtp.device import this_device
from mtp.layers.layer import Picks
from mtp.layers.linear import ChooseFew, FusedLinear, pad_outputs
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


@dataclass(frozen=True, eq=False)
class Routing:
    """The choice of `chosen` of `count` experts by the logits of a row.

    Their shares are the softmax of the chosen logits, and the logit after them is that of the shared expert's gate.
    With a `correction [count]` the shares are the sigmoids of the logits over their sum, times `factor`. It decides who
    is chosen, and the shared expert has no gate.
    """

    count: int
    chosen: int
    correction: mx.array | None = None
    factor: float = 1.0

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return the chosen experts and their shares `[rows, chosen]`, and the gates `[rows, 1]`."""
        if self.correction is None:
            gate = logits[:, self.count : self.count + 1]
            logits = logits[:, : self.count]
            chosen = highest(logits, self.chosen)
            # The softmax of the chosen logits is that of all logits, over its sum for the chosen ones.
            return chosen, mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True), gate
        scores = mx.sigmoid(logits[:, : self.count])
        chosen = highest(scores + self.correction, self.chosen)
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, shares / (shares.sum(axis=-1, keepdims=True) + 1e-20) * self.factor, None


class FusedExperts(nn.Module):
    """The experts of a layer, whose gate and up projections are one. The router and the shared gate are one, too."""

    def __init__(self, routing: Routing, router: FusedLinear, products: Sequence[FusedLinear], limit: float) -> None:
        """Take the choice of experts by the outputs of `router`, and the `limit` of their gated units, 0 for none.

        `products` are gate and up of the experts, their down, and gate and up, and down, of the shared one.
        """
        super().__init__()
        self.routing, self.router, self.products, self.limit = routing, router, tuple(products), limit
        self.gate_up, self.down, self.shared_gate_up, self.shared_down = products

    @classmethod
    def of(cls, routing: Routing, router: Sequence[Any], experts: Any, shared: Any, limit: float = 0.0) -> Any:
        """Return the `experts` with the `shared` one fused, or None where parts have several formats.

        The linear layers of `router` are fused into one.
        """
        parts = [
            list(router),
            [experts.gate_proj, experts.up_proj],
            [experts.down_proj],
            [shared.gate_proj, shared.up_proj],
            [shared.down_proj],
        ]
        if not all(map(FusedLinear.fits, parts)):
            return None
        if len(router) > 1:
            pad_outputs(router[-1], routing.count)
        first, *products = (product for part in parts if (product := FusedLinear.of(part)))
        return cls(routing, first, products, limit)

    def choose_few(self, choose: ChooseFew) -> None:
        """Let `choose` decide of which rows and pairs `multiply_few` computes the products."""
        chosen = (replace(product, format=choose(product.format, product.weights)) for product in self.products)
        self.gate_up, self.down, self.shared_gate_up, self.shared_down = chosen

    def __call__(self, x: mx.array) -> mx.array:
        """Return the sum of the chosen experts and the shared one for `x [rows, hidden]`."""
        chosen, shares, gate = self.routing(self.router(x))
        outputs = self._outputs(x, chosen)
        shared = self.shared_down(self._gated(self.shared_gate_up(x)))
        routed = (shares.astype(x.dtype)[:, None] @ outputs)[:, 0]
        return routed + shared if gate is None else _added(routed, shared, gate)

    def _outputs(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Return the outputs `[rows, k, hidden]` of the experts `chosen [rows, k]`."""
        if chosen.size < SORTED_FROM:
            both = self.gate_up.gather(x[:, None, None], chosen)
            return self.down.gather(self._gated(both), chosen).squeeze(-2)
        tile = this_device().expert_tile
        tiles, experts, places = tiles_of(chosen.flatten(), self.routing.count, tile)
        gated = self._gated(self.gate_up.gather(x[tiles // self.routing.chosen], experts, is_sorted=True))
        found = self.down.gather(gated, experts, is_sorted=True)
        return found.reshape(-1, found.shape[-1])[places].reshape(*chosen.shape, -1)

    def _gated(self, both: mx.array) -> mx.array:
        gate, up = mx.split(both, 2, axis=-1)
        return gated_units(gate, up, self.limit)


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


def fuse_experts(block: Any) -> Any:
    """Return mlx-lm's `SparseMoeBlock` fused. Other modules, and one with several formats, stay as they are."""
    if "switch_mlp" not in block or not block.norm_topk_prob:
        return block
    routing = Routing(block.num_experts, block.top_k)
    router = block.gate, block.shared_expert_gate
    return FusedExperts.of(routing, router, block.switch_mlp, block.shared_expert) or block


@partial(mx.compile, shapeless=True)
def gated_units(gate: mx.array, up: mx.array, limit: float = 0.0) -> mx.array:
    """Return silu of `gate` times `up`. A `limit` clamps the gate above, and `up` on both sides."""
    if limit:
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
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
  const $device LogitT* from = logits + ($int64)row * logits_shape[1];
  constexpr int OWN = EXPERTS / 32;
  const float LOWEST = __uint_as_float(0xff800000u);  // minus infinity
  float values[OWN];
  #pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float logit = static_cast<float>(from[lane + 32 * i]);
    values[i] = CORRECTED ? 1.0f / (1.0f + expf(-logit)) + correction[lane + 32 * i] : logit;
  }
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
    if (lane == j) {
      share = CORRECTED ? 1.0f / (1.0f + expf(-static_cast<float>(from[place]))) : expf(best - highest);
      expert = place;
    }
  }
  float sum = share;
  #pragma unroll
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
  if (lane > TOP) return;
  float all = 1.0f;
  if (!CORRECTED) all /= 1.0f + expf(-static_cast<float>(from[EXPERTS]));
  chosen[row * (TOP + 1) + lane] = expert;
  shares[row * (TOP + 1) + lane] = lane < TOP ? share / sum * numbers[0] : all;
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
    float gate = sum_of(sums[2 * o], 16, 1), up = sum_of(sums[2 * o + 1], 16, 1);
    if (numbers[1] > 0.0f) { gate = min(gate, numbers[1]); up = max(-numbers[1], min(up, numbers[1])); }
    if (lane > 0 || first + o >= INNER) continue;
    out[($int64)pair * INNER + first + o] = static_cast<InT>(gate / (1.0f + expf(-gate)) * up);
  }
"""
)

DOWN_SOURCE = (
    r"""
  constexpr int OWN = INNER / 16, UNITS = HOLD * OWN, GROUPS = INNER / GROUP;
  $array InT held[HOLD * INNER];
  $array float share[TOP + 1];
  $array int expert[TOP + 1];
  const int row = blockIdx.y, tid = threadIdx.x;
  if (tid <= TOP) {
    share[tid] = shares[row * (TOP + 1) + tid];
    expert[tid] = chosen[row * (TOP + 1) + tid];
  }
"""
    + PRODUCT
    + r"""
  float sums[OUTS] = {};
  for (int from = 0; from <= TOP; from += HOLD) {
    __syncthreads();
    const int count = min(HOLD, TOP + 1 - from);
    for (int e = tid; e < count * INNER; e += 256) {
      held[e % 16 * UNITS + e / 16] = gated[(($int64)row * (TOP + 1) + from) * INNER + e];
    }
    __syncthreads();
    if (first >= HIDDEN) continue;
    #pragma unroll 4
    for (int unit = lane; unit < count * OWN; unit += 32) {
      load(unit);
      const int j = from + unit / OWN, place = unit % OWN;
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
  }
  #pragma unroll
  for (int o = 0; o < OUTS; ++o) {
    const float y = sum_of(sums[o], 16, 1);
    if (lane == 0 && first + o < HIDDEN) out[($int64)row * HIDDEN + first + o] = static_cast<InT>(y);
  }
"""
)

WEIGHTS = ["w", "scales", "biases", "all_w", "all_scales", "all_biases"]

HELD_BYTES = 30_000
"""Bytes. Bound of the gated units in the memory of a block; on Macs it has 32 KB."""


@cache
def _kernels(language: type[SourceKernel]) -> tuple[SourceKernel, SourceKernel, SourceKernel]:
    """Return the choice of experts, gate and up with their gating, and the weighted down. All layers share them."""
    return (
        language("expert_choice", ["logits", "correction", "numbers"], ["chosen", "shares"], CHOOSE_SOURCE),
        language("expert_gate_up", ["x", "chosen", "numbers", *WEIGHTS], ["out"], GATE_UP_SOURCE),
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
        and block.routing.chosen < 32
    )


class RowExperts(FusedExperts):
    """Fused experts of which kernels compute few rows, each of which reads its experts by itself."""

    def __init__(self, block: FusedExperts, language: type[SourceKernel]) -> None:
        routing = block.routing
        super().__init__(routing, block.router, block.products, block.limit)
        self._language = language
        self._numbers = mx.array([routing.factor, block.limit])
        self._correction = self._numbers if routing.correction is None else routing.correction.astype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[0] > self._language.most_rows:
            return super().__call__(x)
        choose, gate_up, down = _kernels(self._language)
        rows, places, corrected = x.shape[0], self.routing.chosen + 1, self.routing.correction is not None
        hidden, words = self.down.weights[0].shape[1:]
        inner, outputs = words * 32 // BITS, OUTPUTS * THREADS // 32
        logits = self.router.multiply_alone(x, self._language.alone_rows)
        sizes = [("EXPERTS", self.routing.count), ("TOP", places - 1)]
        template = [("InT", x.dtype), *sizes, ("HIDDEN", hidden), ("INNER", inner), ("OUTS", OUTPUTS)]
        template.append(("GROUP", self.down.format.group_size))
        chosen, shares = choose(
            [logits, self._correction, self._numbers],
            blocks=(-(-rows * 32 // THREADS), 1, 1),
            template=[("LogitT", logits.dtype), *sizes, ("CORRECTED", int(corrected))],
            shapes=[(rows, places)] * 2,
            dtypes=[mx.int32, mx.float32],
        )
        gated = gate_up(
            [x, chosen, self._numbers, *self.gate_up.weights, *self.shared_gate_up.weights],
            blocks=(-(-inner // outputs), rows * places, 1),
            template=template,
            shapes=[(rows * places, inner)],
            dtypes=[x.dtype],
        )
        return down(
            [*gated, chosen, shares, *self.down.weights, *self.shared_down.weights],
            blocks=(-(-hidden // outputs), rows, 1),
            template=[*template, ("HOLD", max(1, min(places, HELD_BYTES // (inner * x.itemsize))))],
            shapes=[x.shape],
            dtypes=[x.dtype],
        )[0]


def row_experts(block: Any, dtype: mx.Dtype, language: type[SourceKernel], picks: Picks) -> Any:
    """Return fused experts with kernels in `language`, or `block` itself where they do not compute it."""
    if type(block) is not FusedExperts or not has_row_kernels(block, dtype):
        return block
    own, hidden = RowExperts(block, language), block.down.weights[0].shape[1]
    shapes, source = f"{block.routing.count} experts", CHOOSE_SOURCE + GATE_UP_SOURCE + DOWN_SOURCE
    return own if picks("expert_rows", shapes, source, hidden, own, block) else block
