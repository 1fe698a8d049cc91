"""The replacement of reference layers by those for Apple GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mtp.layers.layer import Layer, report_fallback
from mtp.layers.metal.attention import JoinedAttentionLayer
from mtp.layers.metal.gated_delta import gated_delta_window
from mtp.layers.metal.gdn import JoinedGDNLayer, WindowGDNLayer, has_window_kernel, joined_inputs
from mtp.layers.metal.products import Format, JoinedMLP
from mtp.layers.reference import ReferenceLayer
from mtp.layers.windows import HEAD_DIM, SPAN_FIELDS, TAPS, GatedDeltaShape


class MetalJoiner:
    """The layers of a stage in joined products. `dtype` is the type of the activations."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype

    def layer(self, layer: ReferenceLayer) -> Layer:
        """Return `layer` joined where its weights have one format, or itself."""
        module: Any = layer.module
        mlp = JoinedMLP.of(module.mlp)
        joined = self._gdn if module.is_linear else JoinedAttentionLayer.of
        replaced: Layer | None = joined(module, mlp)
        if replaced is None and mlp is not None:
            layer.mlp = mlp
        return replaced or layer

    def _gdn(self, module: Any, mlp: JoinedMLP | None) -> Layer | None:
        net = module.linear_attn
        inputs = joined_inputs(net)
        if inputs is None:
            return None
        shape = GatedDeltaShape(net.num_k_heads, net.num_v_heads)
        if (
            has_window_kernel(net)
            and inputs.dtype in (self._dtype, mx.uint8)
            and Format.of(net.out_proj) is not None
            and window_kernel_works(shape, self._dtype)
        ):
            return WindowGDNLayer(module, self._dtype, inputs, mlp)
        joined = JoinedGDNLayer(module, inputs)
        if mlp is not None:
            joined.mlp = mlp
        return joined


@cache
def window_kernel_works(shape: GatedDeltaShape, dtype: mx.Dtype) -> bool:
    """Return whether the window kernel compiles and runs here. Log once why it does not."""
    rows = mx.zeros((1, shape.row), dtype)
    conv = mx.zeros((1, TAPS - 1, shape.channels), dtype)
    state = mx.zeros((1, shape.value_heads, HEAD_DIM, HEAD_DIM), mx.float32)
    rates = mx.zeros((shape.value_heads,), mx.float32)
    constants = (
        mx.zeros((shape.channels, TAPS), dtype),
        rates,
        rates,
        mx.zeros((HEAD_DIM,), dtype),
        mx.array([1e-6]),
    )
    # The spans of one sequence are in another address space than those of more, which makes another kernel.
    spans = [mx.zeros((count, SPAN_FIELDS), mx.int32) for count in (1, 2)]
    try:
        for some in spans:
            mx.eval(gated_delta_window(shape, rows, rows, conv, state, some, constants))
    except Exception as error:  # whatever the compiler of a machine finds wrong
        report_fallback("gated_delta_window", str(error))
        return False
    return True
