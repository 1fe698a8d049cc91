"""Linear layers side by side, as one product of one array of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Weights = tuple[mx.array, ...]


@dataclass(frozen=True)
class Format:
    """The quantization of weights, by MLX's names. `bits` None is none."""

    bits: int | None = None
    group_size: int = 0
    mode: str = ""

    @classmethod
    def of(cls, module: Any) -> Format | None:
        """Return the format of a linear layer that can be joined, None for any other module."""
        if "weight" not in module or "bias" in module or "global_scale" in module:
            return None
        if type(module) is nn.Linear:
            return cls()
        if type(module) is nn.QuantizedLinear:
            return cls(module.bits, module.group_size, module.mode)
        return None

    def multiply(self, x: mx.array, weights: Weights) -> mx.array:
        """Return `x [rows, inputs]` times the weights: `[rows, outputs]`."""
        if self.bits is None:
            return x @ weights[0].T
        weight, scales, biases = (*weights, None)[:3]
        assert weight is not None and scales is not None
        return mx.quantized_matmul(
            x, weight, scales, biases, True, self.group_size, self.bits, self.mode
        )


@dataclass(frozen=True, eq=False)
class JoinedLinear:
    """Linear layers of one format, whose outputs follow each other."""

    format: Format
    weights: Weights

    @property
    def dtype(self) -> mx.Dtype:
        """The type of dense weights or of scales."""
        return self.weights[0 if self.format.bits is None else 1].dtype

    @classmethod
    def of(cls, modules: Sequence[Any], order: mx.array | None = None) -> JoinedLinear | None:
        """Return `modules` as one, or None if they have different formats. Several modules lose their weights.

        `order` are the outputs in another order.
        """
        formats = {Format.of(module) for module in modules}
        types = {(m.scales if "scales" in m else m.weight).dtype for m in modules}
        joined_format = formats.pop()
        if formats or len(types) > 1 or joined_format is None:
            return None
        names = [name for name in ("weight", "scales", "biases") if name in modules[0]]
        weights = tuple(_joined([module[name] for module in modules], order) for name in names)
        if len(modules) > 1:
            mx.eval(weights)
            for module in modules:
                for name in names:
                    del module[name]
            mx.clear_cache()
        return cls(joined_format, weights)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs for `x [rows, inputs]`."""
        return self.format.multiply(x, self.weights)


def _joined(parts: Sequence[mx.array], order: mx.array | None) -> mx.array:
    rows = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
    return rows if order is None else rows[order]
