"""MLPs with fused projections, and the sum before a norm.

A function that runs a part of a layer takes its weights as arguments, so that layers of one shape share one trace of
`mx.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.exact import ExactProducts
from mtp.layers.linear import Format, FusedLinear, Weights
from mtp.layers.source_kernel import MetalKernel
from mtp.layers.stream_rows import add_and_norm

COMPILED_ROWS = 64
"""Rows up to which parts of a layer are compiled. Each number of rows is traced once, and prompts have many."""


@lru_cache(maxsize=32)
def compiled(function: Callable[..., Any], shape: Any) -> Callable[..., Any]:
    """Return `function` of `shape` and of arrays, traced once for each number of rows."""
    run = mx.compile(lambda *arrays: function(shape, *arrays))
    return lambda _, *arrays: run(*arrays)


class FusedMLP:
    """A gated MLP whose gate and up projections are one, with its residual."""

    communicator: Communicator = ALONE

    def __init__(self, gate_up: FusedLinear, down: FusedLinear) -> None:
        self.formats = gate_up.format, down.format
        self.weights = gate_up.weights, down.weights

    @classmethod
    def of(cls, mlp: Any) -> FusedMLP | None:
        """Return `mlp` fused, or None if it is no dense MLP or has different formats."""
        if not all(name in mlp for name in ("gate_proj", "up_proj", "down_proj")):
            return None
        if Format.of(mlp.down_proj) is None:
            return None
        gate_up = FusedLinear.of([mlp.gate_proj, mlp.up_proj])
        down = FusedLinear.of([mlp.down_proj]) if gate_up else None
        return None if gate_up is None or down is None else cls(gate_up, down)

    def add_output(self, x: mx.array, norm: Callable[[mx.array], mx.array]) -> mx.array:
        """See `MLP.add_output`."""
        return x + self.communicator.sum(gated_products(self.formats, self.weights, norm(x)))

    def pin_exact(self, products: ExactProducts) -> None:
        """Raise, because a stage in exact mode keeps the reference."""
        raise NotImplementedError("a fused MLP has no exact mode")


def gated_products(
    formats: tuple[Format, Format], weights: tuple[Weights, Weights], x: mx.array
) -> mx.array:
    """Return a gated MLP of `x [rows, hidden]`."""
    gate, up = mx.split(formats[0].multiply(x, weights[0]), 2, axis=-1)
    return formats[1].multiply(nn.silu(gate) * up, weights[1])


def add_norm(
    x: mx.array, y: mx.array, weight: mx.array, eps: float, own: bool
) -> tuple[mx.array, mx.array]:
    """Return `x + y [rows, hidden]`, and its norm. `own` takes the kernel if all arrays have one type."""
    if not own or not x.dtype == y.dtype == weight.dtype:
        x = x + y
        return x, mx.fast.rms_norm(x, weight, eps)
    return add_and_norm(MetalKernel, x, (y,), weight, mx.array([eps]))
