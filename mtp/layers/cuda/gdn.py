"""A GatedDeltaNet layer with fused projections and the window kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.cuda.packed_linear import FEW_ROWS, PackedMLP, add_packed_mlp, add_product, fused, product_of
from mtp.layers.exact import ExactProducts
from mtp.layers.gdn_windows import (
    GatedDeltaShape,
    SnapshotGDNCache,
    Snapshots,
    gather_windows,
    next_windows,
    record_windows,
    recurrence_of,
    window_kernel,
)
from mtp.layers.layer import Hole, KVFormat, Layer, PlainMLP
from mtp.layers.source_kernel import CudaKernel

gated_delta_window = window_kernel(CudaKernel)


class PackedGDNLayer(Layer):
    """A GatedDeltaNet layer whose input projections are one."""

    kind = "packed"

    def __init__(self, layer: DecoderLayer, dtype: mx.Dtype, mlp: PackedMLP | None, *, exact: bool = False) -> None:
        """Pack `layer` for activations of `dtype`. Its MLP is `mlp` if that is packed."""
        net = layer.linear_attn
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.mlp: PackedMLP | PlainMLP = PlainMLP(layer.mlp) if mlp is None else mlp
        self.dtype = dtype
        self.recurrence = recurrence_of(gated_delta_window, net, dtype)
        self.shape, self.constants = self.recurrence.shape, self.recurrence.constants
        inputs = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a]
        self.projection = fused(inputs, padded=True, exact=exact)
        self.out = fused([net.out_proj], exact=exact)
        self._body: Callable[..., Any] | None = None
        self._weights: tuple[Any, ...] = ()
        """The arguments of the compiled layer between the rows and the state: its own weights, the MLP's, constants.

        They never change, and looking them up takes as long as building an operation."""
        if self.projection.weights and self.out.weights:
            self._body = _compiled_body(self.shape, self.norm.eps, ALONE)
            own = (self.norm.weight, self.projection.weights, self.out.weights)
            mlp_weights = () if mlp is None else mlp.weights(self.mlp_norm)
            self._weights = (own, mlp_weights, self.constants)

    def share(self, communicator: Communicator) -> None:
        super().share(communicator)
        if self._body is not None:
            self._body = _compiled_body(self.shape, self.norm.eps, communicator)

    def new_cache(self, kv_format: KVFormat) -> SnapshotGDNCache:
        return SnapshotGDNCache.empty(self.recurrence, self.dtype)

    def pin_exact(self, products: ExactProducts) -> None:
        self.projection.pin_exact(products)
        self.out.pin_exact(products)
        self.mlp.pin_exact(products)

    def forward(
        self,
        x: mx.array,
        caches: Sequence[SnapshotGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        windows = next_windows(caches, widths, stay_open)
        arrays = gather_windows(x, windows)
        # A first window has no past: any rows stand for it, and every shape of them would be traced.
        past = None if arrays.past is x else arrays.past
        state_arrays = (arrays.conv, arrays.state, arrays.spans)
        if self._body is not None and past is not None and x.shape[0] <= FEW_ROWS:
            x, rows, conv, state = self._body(x, *self._weights, past, *state_arrays)
            has_mlp = bool(self._weights[1])
        else:
            rows = self.projection(self.norm(x))
            y, conv, state = gated_delta_window(
                self.shape, rows, rows if past is None else past, *state_arrays, self.constants
            )
            x, has_mlp = add_product(self.communicator, self.out, y, x), False
        record_windows(caches, windows, rows, Snapshots(conv, state))
        return x if has_mlp else self.mlp.add_output(x, self.mlp_norm)


@lru_cache(maxsize=8)
def _compiled_body(shape: GatedDeltaShape, eps: float, communicator: Communicator) -> Callable[..., Any]:
    """Return the layer, traced once for every shape of the arguments."""

    def body(
        x: mx.array,
        weights: Any,
        mlp: Any,
        constants: Any,
        past: mx.array,
        conv: mx.array,
        state: mx.array,
        spans: mx.array,
    ) -> Any:
        norm, inputs, out = weights
        rows = product_of(inputs)(mx.fast.rms_norm(x, norm, eps))
        y, conv, state = gated_delta_window(shape, rows, past, conv, state, spans, tuple(constants))
        x = add_product(communicator, product_of(out), y, x)
        x = add_packed_mlp(communicator, mlp, eps, x) if mlp else x
        return x, rows, conv, state

    return mx.compile(body)
