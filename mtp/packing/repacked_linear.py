"""Quantized linear layers with a factor per output, and with the inputs in another order.

FP8 and NVFP4 have scales that MLX's formats cannot hold, per tensor or per row. They multiply the outputs here. GPTQ
with `desc_act` sorts the inputs of a layer by their importance; the layer takes its inputs in that order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

Module = TypeVar("Module", bound=nn.Module)

EXTRAS = ("output_scale", "input_order")
"""The parameters that these layers have beside those of MLX's quantized layers."""


class RepackedLinear(nn.QuantizedLinear):
    """A quantized linear layer with `output_scale [1]` or `[outputs, 1]`, `input_order [inputs]`, or both.

    Like the other parameters, a factor per output has the outputs as rows, so that rows can be moved.
    """

    @classmethod
    def like(cls, layer: nn.QuantizedLinear, extras: dict[str, mx.array]) -> RepackedLinear:
        """Return a layer with the settings of `layer` and the parameters `extras`."""
        outputs, words = layer.weight.shape
        made = cls(
            words * 32 // layer.bits, outputs, False, layer.group_size, layer.bits, layer.mode
        )
        return _with_parameters(made, extras)

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x [..., inputs]` times the weight."""
        if "input_order" in self:
            x = mx.take(x, self.input_order, axis=-1)
        if "output_scale" not in self:
            plain: mx.array = super().__call__(x)
            return plain
        y: mx.array = super().__call__(_wide(x))
        scaled: mx.array = y.astype(mx.float32) * self.output_scale.reshape(-1)
        return scaled.astype(x.dtype)


class RepackedSwitchLinear(QuantizedSwitchLinear):
    """Quantized linear layers of experts with `output_scale [experts, 1]` or `[experts, outputs, 1]`."""

    @classmethod
    def like(
        cls, layer: QuantizedSwitchLinear, extras: dict[str, mx.array]
    ) -> RepackedSwitchLinear:
        """Return layers with the settings of `layer` and the parameters `extras`."""
        experts, outputs, words = layer.weight.shape
        made = cls(
            words * 32 // layer.bits,
            outputs,
            experts,
            False,
            layer.group_size,
            layer.bits,
            layer.mode,
        )
        return _with_parameters(made, extras)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return `x` times the weights of the experts `indices`, as mlx-lm's layer does."""
        y: mx.array = super().__call__(_wide(x), indices, sorted_indices)
        scale = self.output_scale.reshape(self.num_experts, 1, -1)[indices]
        scaled: mx.array = y.astype(mx.float32) * scale
        return scaled.astype(x.dtype)


def add_extras(model: nn.Module, stored: dict[str, mx.array]) -> None:
    """Replace the quantized layers of `model` for which `stored` has parameters of EXTRAS, by their paths.

    Raises TypeError when there is no such layer for a module.
    """
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in stored.items():
        path, _, leaf = name.rpartition(".")
        if leaf in EXTRAS:
            found.setdefault(path, {})[leaf] = array
    modules = dict(model.named_modules())
    made = [(path, _with_extras(modules[path], extras)) for path, extras in found.items()]
    model.update_modules(tree_unflatten(made))


def _with_extras(module: nn.Module, extras: dict[str, mx.array]) -> nn.Module:
    """Return the quantized `module` as a layer that has `extras` too."""
    if isinstance(module, nn.QuantizedLinear):
        return RepackedLinear.like(module, extras)
    if isinstance(module, QuantizedSwitchLinear) and set(extras) == {"output_scale"}:
        return RepackedSwitchLinear.like(module, extras)
    raise TypeError(f"a {type(module).__name__} cannot have {' and '.join(sorted(extras))}")


def _with_parameters(module: Module, parameters: dict[str, mx.array]) -> Module:
    for name, array in parameters.items():
        setattr(module, name, array)
    return module


def _wide(x: mx.array) -> Any:
    """Return float16 as float32: an output can exceed the range of float16 before it is multiplied by its scale."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x
