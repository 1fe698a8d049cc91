"""The replacement of reference layers by those for Apple GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mtp.layers import gated_delta, prepare_rows
from mtp.layers.expert_rows import row_experts
from mtp.layers.experts import join_experts
from mtp.layers.layer import KernelTrial, Layer, Mixer, PlainMLP, Rows
from mtp.layers.linear import Format, JoinedLinear
from mtp.layers.metal.attention import (
    JoinedAttentionLayer,
    PreparedAttentionLayer,
    joined_projections,
)
from mtp.layers.metal.gdn import JoinedGDNLayer, WindowGDNLayer, gated_delta_window, joined_inputs
from mtp.layers.metal.kernel import MetalKernel
from mtp.layers.metal.products import NORM_SOURCE, JoinedMLP
from mtp.layers.metal.trial import MixerTrial, RowsTrial, Tried, try_layer
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.gdn import GDNLayer
from mtp.layers.windows import WindowMixer

Choose = Callable[[str, str, str, Callable[[], KernelTrial]], bool]
"""A function of a kernel's name, its shapes, its source and its trial. It returns whether to use the kernel."""


class MetalJoiner:
    """The layers of a stage in joined products. Its activations are `[rows, hidden]` of `dtype`.

    `choose` decides over each kernel, by a trial of one layer with it and without it.
    """

    def __init__(self, hidden: int, dtype: mx.Dtype, choose: Choose) -> None:
        self._hidden, self._dtype = hidden, dtype
        self._choose = choose

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` joined where its weights have one format, or itself."""
        module: Any = layer.module
        joined_experts = join_experts(module.mlp)
        module.mlp = row_experts(joined_experts, self._dtype, MetalKernel, self.picks)
        mlp = JoinedMLP.of(module.mlp)
        replaced = (
            self._gdn(layer, mlp) if isinstance(layer, GDNLayer) else self._attention(module, mlp)
        )
        if replaced is None:
            layer.mlp = mlp or PlainMLP(module.mlp)
        return replaced or layer

    def _gdn(self, layer: GDNLayer, mlp: JoinedMLP | None) -> Layer | None:
        module, net = layer.module, layer.net
        inputs = joined_inputs(net)
        if inputs is None:
            return None
        joined = JoinedGDNLayer(module, inputs)
        if mlp is not None:
            joined.mlp = mlp
        if not self._has_window_kernel(net, inputs):
            return joined
        window, joining = (
            WindowGDNLayer(module, self._dtype, inputs, mlp, joins_norm=joins)
            for joins in (False, True)
        )
        shapes = f"{net.num_k_heads} and {net.num_v_heads} heads"
        if not self._wins("gated_delta_window", shapes, gated_delta.SOURCE, window, joined):
            return joined
        return joining if mlp and self._wins_norm(joining, window) else window

    def mixer(self, inner: Any) -> Mixer:
        """Return `inner`, a `GDNLayer.over` the modules, joined where its weights have one format, or itself."""
        net = inner.net
        if (inputs := joined_inputs(net)) is None:
            return cast(Mixer, inner)
        joined = JoinedGDNLayer.over(net, self._dtype)
        joined.join(inputs)
        out = JoinedLinear.of([net.out_proj])
        if out is None or not self._has_window_kernel(net, inputs):
            return joined
        recurrence = gated_delta.recurrence_of(
            gated_delta_window, net, self._dtype, silu=inner.silu
        )
        window = WindowMixer(recurrence, self._dtype, inputs, out)
        shapes = f"{net.num_k_heads} and {net.num_v_heads} heads"
        shapes += "" if inner.silu else " with a sigmoid gate"
        sides = MixerTrial(window), MixerTrial(joined)
        won = self._wins("gated_delta_window", shapes, gated_delta.SOURCE, *sides)
        return window if won else joined

    def _has_window_kernel(self, net: Any, inputs: JoinedLinear) -> bool:
        return (
            gated_delta.has_window_kernel(net)
            and inputs.dtype in (self._dtype, mx.uint8)
            and Format.of(net.out_proj) is not None
        )

    def _attention(self, module: Any, mlp: JoinedMLP | None) -> Layer | None:
        attention = module.self_attn
        parts = joined_projections(attention)
        if parts is None:
            return None
        best = JoinedAttentionLayer(module, parts, mlp, joins_norm=False)
        if prepare_rows.can_prepare(attention):
            prepared = PreparedAttentionLayer(module, parts, mlp, joins_norm=False)
            shapes = f"{attention.num_attention_heads} and {attention.num_key_value_heads} heads"
            if self._wins("attention_prepare", shapes, prepare_rows.SOURCE, prepared, best):
                best = prepared
        joining = type(best)(module, parts, mlp, joins_norm=True)
        return joining if mlp and self._wins_norm(joining, best) else best

    def picks(
        self, kernel: str, shapes: str, source: str, width: int, own: Rows, replaced: Rows
    ) -> bool:
        """See `Picks`."""
        sides = RowsTrial(own), RowsTrial(replaced)
        trial = partial(try_layer, *sides, width, self._dtype)
        return self._choose(kernel, f"{shapes}, rows of {width} in {self._dtype}", source, trial)

    def _wins_norm(self, joining: Layer, without: Layer) -> bool:
        return self._wins("residual_norm", "any heads", NORM_SOURCE, joining, without)

    def _wins(
        self, kernel: str, shapes: str, source: str, with_kernel: Tried, without: Tried
    ) -> bool:
        """Return whether a layer with `kernel` is right and not slower than the same layer without it."""
        known = f"{shapes}, rows of {self._hidden} in {self._dtype}"
        trial = partial(try_layer, with_kernel, without, self._hidden, self._dtype)
        return self._choose(kernel, known, source, trial)
