"""The replacement of reference layers by those for Apple GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from mtp.layers import gated_delta, prepare_rows
from mtp.layers.layer import KernelTrial, Layer
from mtp.layers.metal import add_norm
from mtp.layers.metal.attention import (
    JoinedAttentionLayer,
    PreparedAttentionLayer,
    joined_projections,
)
from mtp.layers.metal.gdn import JoinedGDNLayer, WindowGDNLayer, has_window_kernel, joined_inputs
from mtp.layers.metal.products import Format, JoinedMLP
from mtp.layers.metal.trial import try_layer
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.gdn import GDNLayer


class Choose(Protocol):
    """A function that chooses between a kernel of this project and the operations that it replaces."""

    def __call__(
        self, kernel: str, shapes: str, source: str, run_trial: Callable[[], KernelTrial]
    ) -> bool:
        """Return whether to use `kernel` of text `source` at `shapes`. `run_trial` tries it."""


class MetalJoiner:
    """The layers of a stage in joined products. `dtype` is the type of the activations.

    `choose` decides over each kernel, by a trial of one layer with it and without it.
    """

    def __init__(self, dtype: mx.Dtype, choose: Choose) -> None:
        self._dtype = dtype
        self._choose = choose

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` joined where its weights have one format, or itself."""
        module: Any = layer.module
        mlp = JoinedMLP.of(module.mlp)
        replaced = (
            self._gdn(layer, mlp) if isinstance(layer, GDNLayer) else self._attention(module, mlp)
        )
        if replaced is None and mlp is not None:
            layer.mlp = mlp
        return replaced or layer

    def _gdn(self, layer: GDNLayer, mlp: JoinedMLP | None) -> Layer | None:
        module, net = layer.module, layer.net
        inputs = joined_inputs(net)
        if inputs is None:
            return None
        joined = JoinedGDNLayer(module, inputs)
        if mlp is not None:
            joined.mlp = mlp
        if (
            not has_window_kernel(net)
            or inputs.dtype not in (self._dtype, mx.uint8)
            or Format.of(net.out_proj) is None
        ):
            return joined

        def window(*, joins_norm: bool = False) -> Layer:
            """Return the layer with the kernel of windows."""
            return WindowGDNLayer(module, self._dtype, inputs, mlp, joins_norm=joins_norm)

        shapes = f"{net.num_k_heads} and {net.num_v_heads} heads"
        source = gated_delta.SOURCE
        best = self._faster("gated_delta_window", shapes, source, module, joined, window)
        if best is joined or mlp is None:
            return best
        return self._with_norm(module, best, lambda: window(joins_norm=True))

    def _attention(self, module: Any, mlp: JoinedMLP | None) -> Layer | None:
        attention = module.self_attn
        parts = joined_projections(attention)
        if parts is None:
            return None
        kind: type[JoinedAttentionLayer] = JoinedAttentionLayer

        def variant(*, joins_norm: bool = False) -> Layer:
            """Return the layer with the chosen kernels."""
            return kind(module, *parts, mlp, joins_norm=joins_norm)

        best = variant()
        if prepare_rows.can_prepare(attention):
            shapes = f"{attention.num_attention_heads} and {attention.num_key_value_heads} heads"
            source, joined, kind = prepare_rows.SOURCE, best, PreparedAttentionLayer
            best = self._faster("attention_prepare", shapes, source, module, joined, variant)
            kind = JoinedAttentionLayer if best is joined else kind
        if mlp is None:
            return best
        return self._with_norm(module, best, lambda: variant(joins_norm=True))

    def _with_norm(self, module: Any, best: Layer, joining: Callable[[], Layer]) -> Layer:
        return self._faster("residual_norm", "", add_norm.SOURCE, module, best, joining)

    def _faster(
        self,
        kernel: str,
        shapes: str,
        source: str,
        module: Any,
        without: Layer,
        with_kernel: Callable[[], Layer],
    ) -> Layer:
        """Return the layer with `kernel` if that is right and not slower than the one without it."""
        hidden = module.input_layernorm.weight.shape[0]

        def run_trial() -> KernelTrial:
            """Try the kernel in this layer."""
            return try_layer(with_kernel(), without, hidden, self._dtype)

        known = ", ".join(filter(None, [shapes, f"rows of {hidden}", str(self._dtype)]))
        return with_kernel() if self._choose(kernel, known, source, run_trial) else without
