"""Mixtures of experts in fewer operations than mlx-lm's modules: fused products, and fused element-wise operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.linear import FusedLinear, pad_outputs

SORTED_FROM = 64
"""Pairs of a row and an expert that are computed expert by expert, as mlx-lm does. Fewer are not worth the sorting."""


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
        chosen = mx.argpartition(logits, kth=-self.chosen, axis=-1)[:, -self.chosen :]
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
        experts = chosen.flatten()
        order = mx.argsort(experts)
        rows, experts = x[order // self.chosen][:, None], experts[order]
        gated = _halves_gated(self.gate_up.gather(rows, experts, is_sorted=True))
        found = self.down.gather(gated, experts, is_sorted=True)
        return found[mx.argsort(order)].reshape(*chosen.shape, -1)


def _halves_gated(both: mx.array) -> mx.array:
    """Return the gated product of gate and up, the halves of `both`."""
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
