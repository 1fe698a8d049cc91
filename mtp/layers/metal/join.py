"""The replacement of reference layers by those for Apple GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from mtp.layers.gated_delta import SOURCE
from mtp.layers.layer import KernelTrial, Layer
from mtp.layers.metal.attention import JoinedAttentionLayer
from mtp.layers.metal.gdn import (
    JoinedGDNLayer,
    WindowGDNLayer,
    has_window_kernel,
    joined_inputs,
    window_recurrence,
)
from mtp.layers.metal.products import Format, JoinedMLP
from mtp.layers.metal.trial import try_window_kernel
from mtp.layers.reference import ReferenceLayer
from mtp.layers.reference.gdn import GDNLayer


class Choose(Protocol):
    """A function that chooses between a kernel of this project and the operations that it replaces."""

    def __call__(
        self, kernel: str, shapes: str, source: str, run_trial: Callable[[bool], KernelTrial]
    ) -> bool:
        """Return whether to use `kernel` of text `source` at `shapes`. `run_trial(timed)` tries it."""


class MetalJoiner:
    """The layers of a stage in joined products. `dtype` is the type of the activations.

    `choose` decides over the window kernel. The other kernels of this project have no trial yet, so they run only if
    the user asks for `untimed` kernels.
    """

    def __init__(self, dtype: mx.Dtype, choose: Choose, *, untimed: bool = False) -> None:
        self._dtype = dtype
        self._choose = choose
        self._untimed = untimed

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` joined where its weights have one format, or itself."""
        module: Any = layer.module
        mlp = JoinedMLP.of(module.mlp)
        replaced: Layer | None = (
            self._gdn(layer, mlp)
            if isinstance(layer, GDNLayer)
            else JoinedAttentionLayer.of(module, mlp, untimed=self._untimed)
        )
        if replaced is None and mlp is not None:
            layer.mlp = mlp
        return replaced or layer

    def _gdn(self, layer: GDNLayer, mlp: JoinedMLP | None) -> Layer | None:
        module, net = layer.module, layer.net
        inputs = joined_inputs(net)
        if inputs is None:
            return None
        if (
            has_window_kernel(net)
            and inputs.dtype in (self._dtype, mx.uint8)
            and Format.of(net.out_proj) is not None
            and self._chooses_window_kernel(layer)
        ):
            return WindowGDNLayer(module, self._dtype, inputs, mlp, untimed=self._untimed)
        joined = JoinedGDNLayer(module, inputs)
        if mlp is not None:
            joined.mlp = mlp
        return joined

    def _chooses_window_kernel(self, layer: GDNLayer) -> bool:
        net = layer.net
        shapes = f"{net.num_k_heads} and {net.num_v_heads} heads in {self._dtype}"

        def run_trial(timed: bool) -> KernelTrial:
            """Try the kernel in this layer."""
            recurrence = window_recurrence(net, self._dtype)
            return try_window_kernel(layer, recurrence, self._dtype, timed=timed)

        return self._choose("gated_delta_window", shapes, SOURCE, run_trial)
