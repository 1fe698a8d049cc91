"""A GatedDeltaNet layer with fused projections and the window kernel, for MLX's CUDA backend.

`worker.model.gdn` is the reference: it does the same with mlx-lm's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from mtp.kernels.cuda import HALF_TYPES
from mtp.kernels.gated_delta import HEAD_DIM, TAPS, GatedDeltaShape, gated_delta_window
from mtp.kernels.packed_linear import FEW_ROWS, PackedLinear
from mtp.kernels.projections import add_mlp, add_packed_mlp, joined, packed_mlp_weights
from worker.cache.snapshot_gdn_cache import (
    SnapshotGDNCache,
    Snapshots,
    Window,
    gather_windows,
    record_windows,
)


def can_pack_gdn(layer: GatedDeltaNet, dtype: mx.Dtype) -> bool:
    """Return whether the kernel computes `layer` with activations of `dtype`."""
    return (
        dtype in HALF_TYPES
        and layer.head_k_dim == layer.head_v_dim == HEAD_DIM
        and layer.conv_kernel_size == TAPS
        and "bias" not in layer.conv1d
    )


class PackedGDN(nn.Module):
    """A GatedDeltaNet layer whose input projections are one."""

    def __init__(self, layer: GatedDeltaNet, dtype: mx.Dtype) -> None:
        super().__init__()
        self.shape = GatedDeltaShape(layer.num_k_heads, layer.num_v_heads)
        self._compiled: CompiledBody | None = None
        self.dtype = dtype
        self.constants = (
            layer.conv1d.weight.reshape(-1, TAPS).astype(dtype),
            layer.A_log.astype(mx.float32),
            layer.dt_bias.astype(mx.float32),
            layer.norm.weight.astype(dtype),
            mx.array([layer.norm.eps]),
        )
        inputs = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
        self.projection = joined(inputs, padded=True)
        self.out = joined([layer.out_proj])
        mx.eval(self.constants)

    def new_cache(self) -> SnapshotGDNCache:
        """Return the empty cache of a new sequence."""
        return SnapshotGDNCache.empty(self.shape, self.constants, self.dtype)

    def add(
        self,
        x: mx.array,
        norm: nn.RMSNorm,
        caches: Sequence[SnapshotGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool],
        mlp: tuple[nn.Module, nn.RMSNorm],
    ) -> mx.array:
        """Return `x [rows, hidden]` plus GDN and MLP, each of its norm. Sequence i owns the next `widths[i]` rows.

        Advances each cache. A window that stays open can be cut down later.
        """
        windows, start = [], 0
        for cache, width, stays_open in zip(caches, widths, stay_open, strict=True):
            windows.append(Window(cache.point, start, width, stays_open))
            start += width
        arrays = gather_windows(x, windows)
        # A first window has no past: any rows stand for it, and every shape of them would be traced.
        past = None if arrays.past is x else arrays.past
        body = self._body(norm, mlp) if x.shape[0] <= FEW_ROWS and past is not None else None
        if body is not None:
            x, rows, conv, state = body.run(
                x, *body.weights, past, arrays.conv, arrays.state, arrays.spans
            )
            if not body.has_mlp:
                x = add_mlp(*mlp, x)
        else:
            projection, out = self.projection, self.out
            rows = projection(norm(x))
            y, conv, state = gated_delta_window(
                self.shape,
                rows,
                rows if past is None else past,
                arrays.conv,
                arrays.state,
                arrays.spans,
                self.constants,
            )
            x = add_mlp(*mlp, out(y, x))
        record_windows(caches, windows, rows, Snapshots(conv, state))
        return x

    def _body(self, norm: nn.RMSNorm, mlp: tuple[nn.Module, nn.RMSNorm]) -> CompiledBody | None:
        """Return the compiled layer with its weights, or None if its projections are not packed.

        The weights of a layer never change, and looking them up takes as long as building an operation.
        """
        if self._compiled is None:
            projection, out = self.projection, self.out
            if not (isinstance(projection, PackedLinear) and isinstance(out, PackedLinear)):
                return None
            own = (norm.weight, projection.w, projection.factors, out.w, out.factors)
            run = _compiled_body(self.shape, norm.eps)
            self._compiled = CompiledBody(run, (own, packed_mlp_weights(*mlp), self.constants))
        return self._compiled


@dataclass(frozen=True)
class CompiledBody:
    """A compiled layer, and its arguments between the rows and the state: its own weights, the MLP's, constants."""

    run: Callable[..., Any]
    weights: tuple[tuple[mx.array, ...], tuple[mx.array, ...], tuple[mx.array, ...]]

    @property
    def has_mlp(self) -> bool:
        """True if the compiled layer includes the MLP."""
        return bool(self.weights[1])


@lru_cache(maxsize=8)
def _compiled_body(shape: GatedDeltaShape, eps: float) -> Callable[..., Any]:
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
        norm, w, factors, out_w, out_factors = weights
        rows = PackedLinear(w, factors)(mx.fast.rms_norm(x, norm, eps))
        y, conv, state = gated_delta_window(shape, rows, past, conv, state, spans, tuple(constants))
        x = PackedLinear(out_w, out_factors)(y, x)
        return (add_packed_mlp(mlp, eps, x) if mlp else x), rows, conv, state

    return mx.compile(body)
