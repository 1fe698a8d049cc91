"""Projections over a part of their outputs, which a draft vocabulary needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Projection = Callable[[mx.array], mx.array]
"""Outputs `[rows, outputs]` of `[rows, inputs]`."""

SELECTABLE = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)
"""The modules of MLX whose weights have a row for each output."""


def can_select(module: Any) -> bool:
    """Return whether `select_blocks` takes `module`."""
    inner = getattr(module, "inner", module)  # the module that exact mode wraps
    inner = getattr(inner, "__self__", inner)
    own = hasattr(inner, "select_blocks") or type(inner) in SELECTABLE
    return own and "bias" not in inner


def select_blocks(module: Any, blocks: slice | mx.array, size: int) -> Projection:
    """Return the projection with only these blocks of `size` neighbouring outputs."""
    if (select := getattr(module, "select_blocks", None)) is not None:
        found: Projection = select(blocks, size)
        return found

    def selected(value: mx.array) -> mx.array:
        taken = value.reshape(-1, size, value.shape[1])[blocks]
        return taken.reshape(-1, value.shape[1])

    weight = selected(module.weight)
    if "scales" not in module:
        return lambda x: x @ weight.T
    scales = selected(module.scales)
    biases = selected(module.biases) if "biases" in module else None
    settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return lambda x: mx.quantized_matmul(x, weight, scales, biases, transpose=True, **settings)
