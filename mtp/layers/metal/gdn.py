"""GatedDeltaNet layers in fused products with this project's kernel for windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.gdn_windows import (
    GatedDeltaShape,
    SnapshotGDNCache,
    Snapshots,
    gather_windows,
    kept_rows,
    next_windows,
    record_windows,
    recurrence_of,
    window_kernel,
)
from mtp.layers.layer import Hole, KVFormat, Layer, PlainMLP
from mtp.layers.linear import COMPILED_ROWS, Format, FusedLinear, FusedMLP, add_norm, compiled, gated_products
from mtp.layers.source_kernel import MetalKernel

gated_delta_window = window_kernel(MetalKernel)


@dataclass(frozen=True)
class _Shape:
    """The heads of a layer, the formats of its products and of its MLP, and the epsilon of its norms."""

    heads: GatedDeltaShape
    products: Format
    out: Format
    mlp: tuple[Format, Format] | None
    eps: float
    fuses_norm: bool
    communicator: Communicator = ALONE


class WindowGDNLayer(Layer):
    """A layer whose windows are one launch between its projections. A rollback changes only a number."""

    kind = "window"

    def __init__(
        self,
        layer: DecoderLayer,
        dtype: mx.Dtype,
        inputs: FusedLinear,
        mlp: FusedMLP | None,
        *,
        fuses_norm: bool,
    ) -> None:
        """Take over `layer`, whose output projection is a linear layer, with caches of `dtype`.

        With `fuses_norm` a kernel adds the residual before the MLP and computes its norm.
        """
        net: Any = layer.linear_attn
        out = FusedLinear.of([net.out_proj])
        assert out is not None
        self.mlp: FusedMLP | PlainMLP = mlp or PlainMLP(layer.mlp)
        self.mlp_norm = layer.post_attention_layernorm
        formats = mlp.formats if mlp else None
        norm = layer.input_layernorm
        self._recurrence = recurrence_of(gated_delta_window, net, dtype)
        heads, constants = self._recurrence.shape, self._recurrence.constants
        self._shape = _Shape(heads, inputs.format, out.format, formats, norm.eps, fuses_norm)
        self._dtype = dtype
        norms = norm.weight, self.mlp_norm.weight
        self._weights = (norms, inputs.weights, out.weights, mlp.weights if mlp else (), constants)
        self._compiled = compiled(_run, self._shape)

    def share(self, communicator: Communicator) -> None:
        super().share(communicator)
        self._shape = replace(self._shape, communicator=communicator)
        self._compiled = compiled(_run, self._shape)

    def new_cache(self, kv_format: KVFormat) -> SnapshotGDNCache:
        return SnapshotGDNCache.empty(self._recurrence, self._dtype)

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
        # A first window has no past. Any rows stand for it.
        past = None if arrays.past is x else arrays.past
        run = self._compiled if past is not None and x.shape[0] <= COMPILED_ROWS else _run
        states = past, arrays.conv, arrays.state, arrays.spans
        x, rows, conv, state = run(self._shape, x, self._weights, states)
        kept, moved = kept_rows(rows, windows)
        record_windows(caches, moved, kept, Snapshots(conv, state))
        return x if self._shape.mlp else self.mlp.add_output(x, self.mlp_norm)


def _run(shape: _Shape, x: mx.array, weights: Any, states: Any) -> Any:
    """Return `x` after the layer, its projected rows, and the saved states."""
    norms, inputs, out, mlp, constants = weights
    past, conv, state, spans = states
    rows = shape.products.multiply(mx.fast.rms_norm(x, norms[0], shape.eps), inputs)
    y, conv, state = gated_delta_window(
        shape.heads, rows, rows if past is None else past, conv, state, spans, tuple(constants)
    )
    y = shape.communicator.sum(shape.out.multiply(y, out))
    if shape.mlp is None:
        return x + y, rows, conv, state
    x, normed = add_norm(x, y, norms[1], shape.eps, shape.fuses_norm)
    added = shape.communicator.sum(gated_products(shape.mlp, mlp, normed))
    return x + added, rows, conv, state
