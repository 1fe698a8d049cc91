"""Linear layers side by side, as one product of one array of weights, and MLPs of such products.

A function that runs a part of a layer takes its weights as arguments, so that layers of one shape share one trace of
`mx.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mtp.device import this_device
from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.exact import ExactProducts
from mtp.layers.few_rows import Weights, multiply_few
from mtp.layers.source_kernel import MetalKernel
from mtp.layers.stream_rows import add_and_norm

PRODUCT_ROWS = 8
"""Metal's fast product of one row with quantized weights has a multiple of this number of outputs."""

COLUMNS = "columns"
"""The mode of dense weights in fp32 that have a row for each input."""

MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""The modes of MLX besides the affine one, by bits and group size."""


@dataclass(frozen=True)
class Format:
    """The quantization of weights, by MLX's names. `bits` None is none, and then the mode may be `COLUMNS`."""

    bits: int | None = None
    group_size: int = 0
    mode: str = ""

    @classmethod
    def of(cls, module: Any) -> Format | None:
        """Return the format of a linear layer that can be fused, None for any other module."""
        dense, known = (nn.Linear, SwitchLinear), (nn.QuantizedLinear, QuantizedSwitchLinear)
        if type(module) not in dense + known or "bias" in module or "global_scale" in module:
            return None
        return cls() if type(module) in dense else cls(module.bits, module.group_size, module.mode)

    @classmethod
    def stored(cls, weight: Any, scales: Any, inputs: int) -> Format:
        """Return the format of a stored weight of `inputs` columns, by the shapes and types of it and of its scales.

        Only the affine mode has scales in the type of the weights. Each other mode has one number of bits and one group
        size. Raises ValueError for any other pair.
        """
        bits, group = weight.shape[-1] * 32 // inputs, inputs // scales.shape[-1]
        if scales.dtype != mx.uint8:
            return cls(bits, group, "affine")
        if (bits, group) not in MODES:
            raise ValueError(f"{bits} bits in groups of {group}")
        return cls(bits, group, MODES[bits, group])

    def multiply(self, x: mx.array, weights: Weights, *, transposed: bool = True) -> mx.array:
        """Return `x [rows, inputs]` times the weights: `[rows, outputs]`. Weights not `transposed` have a row an input.

        All may have further axes before, as those of heads.
        """
        if self.mode == COLUMNS:
            return (x.astype(mx.float32) @ weights[0]).astype(x.dtype)
        if self.bits is None:
            return x @ (weights[0].swapaxes(-1, -2) if transposed else weights[0])
        weight, scales, biases = (*weights, None)[:3]
        assert weight is not None and scales is not None
        return mx.quantized_matmul(x, weight, scales, biases, transposed, self.group_size, self.bits, self.mode)


@dataclass(frozen=True)
class FewRowsFormat(Format):
    """A format of which `multiply_few` multiplies the numbers of rows `few`, the first and the last, in place of MLX.

    With the weights of experts these are numbers of pairs of a row and an expert.
    """

    few: tuple[int, int] = (0, 0)

    @property
    def plain(self) -> Format:
        """MLX's format."""
        return Format(self.bits, self.group_size, self.mode)

    def multiply(self, x: mx.array, weights: Weights, *, transposed: bool = True) -> mx.array:
        rows = x.size // x.shape[-1]
        if not transposed or weights[0].ndim > 2 or not self.few[0] <= rows <= self.few[1]:
            return super().multiply(x, weights, transposed=transposed)
        return multiply_few(self, x.reshape(rows, -1), weights).reshape(*x.shape[:-1], -1)


ChooseFew = Callable[[Format, Weights], Format]
"""A function that returns a format of weights with the rows that `multiply_few` multiplies, by trials."""


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """Linear layers of one format, whose outputs follow each other."""

    format: Format
    weights: Weights

    @property
    def dtype(self) -> mx.Dtype:
        """The type of dense weights or of scales."""
        return self.weights[0 if self.format.bits is None else 1].dtype

    @staticmethod
    def fits(modules: Sequence[Any]) -> bool:
        """Return whether `modules` have one format that can be fused."""
        formats = {Format.of(module) for module in modules}
        types = {(m.scales if "scales" in m else m.weight).dtype for m in modules}
        return len(formats) == len(types) == 1 and None not in formats

    @classmethod
    def of(
        cls,
        modules: Sequence[Any],
        order: mx.array | None = None,
        *,
        columns: Collection[mx.Dtype] = (),
        choose_few: ChooseFew | None = None,
    ) -> FusedLinear | None:
        """Return `modules` as one, or None if they have different formats. Several modules lose their weights.

        `order` are the outputs in another order. The modules may be those of all experts. Dense weights of the types
        `columns` are stored as `by_columns` does. `choose_few` decides which rows `multiply_few` multiplies.
        """
        if (shared_format := Format.of(modules[0])) is None or not cls.fits(modules):
            return None
        names = [name for name in ("weight", "scales", "biases") if name in modules[0]]
        weights = tuple(_concatenated([module[name] for module in modules], order) for name in names)
        fused = cls(shared_format if choose_few is None else choose_few(shared_format, weights), weights)
        if shared_format == Format() and weights[0].dtype in columns and weights[0].ndim == 2:
            fused = cls.by_columns(weights[0])
        if len(modules) > 1:
            mx.eval(weights)
            release(modules)
        return fused

    @classmethod
    def by_columns(cls, weight: mx.array) -> FusedLinear:
        """Return the product with the dense `weight [outputs, inputs]`, copied to fp32 with a row for each input.

        MLX calls the reference BLAS on Linux' CPUs. Its product along the outputs is vectorized, and the other one adds
        one number after another, in the same order. One row takes half the time of weights as they are stored.
        """
        found = mx.contiguous(weight.astype(mx.float32).T)
        mx.eval(found)
        return cls(Format(mode=COLUMNS), (found,))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs for `x [rows, inputs]`."""
        return self.format.multiply(x, self.weights)

    def multiply_alone(self, x: mx.array, most: int) -> mx.array:
        """Return the outputs for few `x [rows, inputs]`; quantized weights give each row the bits that it has alone.

        MLX multiplies more than `most` rows in another order than one. The dense product stays as it is.
        """
        if self.format.bits is None:
            return self(x)
        plain = getattr(self.format, "plain", self.format)
        parts = mx.split(x, list(range(most, x.shape[0], most)))
        return mx.concatenate([plain.multiply(part, self.weights) for part in parts])

    def gather(self, x: mx.array, experts: mx.array, *, is_sorted: bool = False) -> mx.array:
        """Return `x [..., 1, inputs]` times the weights of `experts [...]`, where the layers are those of experts."""
        chosen: Any = {"rhs_indices": experts, "sorted_indices": is_sorted}
        kind = self.format
        if kind.bits is None:
            return mx.gather_mm(x, self.weights[0].swapaxes(-1, -2), **chosen)
        few = kind.few if isinstance(kind, FewRowsFormat) else (0, 0)
        if is_sorted and x.ndim == 3 and x.shape[1] == 1 and few[0] <= experts.size <= few[1]:
            return multiply_few(kind, x[:, 0], self.weights, experts)[:, None]
        weight, scales, *biases = self.weights
        chosen |= {"group_size": kind.group_size, "bits": kind.bits, "mode": kind.mode}
        return mx.gather_qmm(x, weight, scales, biases[0] if biases else None, **chosen)


class InputRows(FusedLinear):
    """A product with weights that have a row for each input: `[..., inputs, outputs]`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs for `x [..., rows, inputs]`."""
        return self.format.multiply(x, self.weights, transposed=False)


Fuse = Callable[..., FusedLinear | None]
"""`FusedLinear.of`, perhaps with types to store by columns and the choice of rows."""


def release(modules: Sequence[Any]) -> None:
    """Delete the weights of modules that others compute."""
    for module in modules:
        for name in ("weight", "scales", "biases"):
            module.pop(name, None)
    mx.clear_cache()


def side_by_side(modules: Sequence[Any], fuse: Callable[[Sequence[Any]], Any]) -> Callable[[mx.array], list[mx.array]]:
    """Return the function of rows that gives the outputs of each of `modules`, by one product if `fuse` makes one.

    The modules then lose their weights. `FusedLinear.of` is one of them.
    """
    ends = list(accumulate(module.weight.shape[0] for module in modules))
    if (fused := fuse(modules)) is None:
        return lambda x: [module(x) for module in modules]
    return lambda x: list(mx.split(fused(x), ends, axis=-1))[: len(ends)]


def pad_outputs(module: Any, before: int) -> None:
    """Add outputs of zero to a linear layer, so that `before` others and its own are a multiple of PRODUCT_ROWS."""
    missing = -(before + module.weight.shape[0]) % PRODUCT_ROWS
    for name in ("weight", "scales", "biases"):
        if name in module:
            module[name] = mx.pad(module[name], [(0, missing), (0, 0)])


def _concatenated(parts: Sequence[mx.array], order: mx.array | None) -> mx.array:
    rows = parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=-2)
    return rows if order is None else rows[order]


def compiled(function: Callable[..., Any], shape: Any) -> Callable[..., Any]:
    """Return `function` of `shape` and of arrays, traced once for each number of rows, or itself on a CPU.

    There MLX calls a C++ compiler, which takes seconds. For ARM it rounds sums of products once, so the bits of a row
    would depend on the rows beside it. A layer of one row would gain a tenth.
    """
    return function if this_device().computes_on_host else _traced(function, shape)


@lru_cache(maxsize=32)
def _traced(function: Callable[..., Any], shape: Any) -> Callable[..., Any]:
    run = mx.compile(lambda *arrays: function(shape, *arrays))
    return lambda _, *arrays: run(*arrays)


class FusedMLP:
    """A gated MLP whose gate and up projections are one, with its residual."""

    communicator: Communicator = ALONE

    def __init__(self, gate_up: FusedLinear, down: FusedLinear) -> None:
        self.formats = gate_up.format, down.format
        self.weights = gate_up.weights, down.weights

    @classmethod
    def of(cls, mlp: Any, fuse: Fuse = FusedLinear.of) -> FusedMLP | None:
        """Return `mlp` fused by `fuse`, or None if it is no dense MLP or has different formats."""
        if not all(name in mlp for name in ("gate_proj", "up_proj", "down_proj")):
            return None
        if Format.of(mlp.down_proj) is None:
            return None
        gate_up = fuse([mlp.gate_proj, mlp.up_proj])
        down = fuse([mlp.down_proj]) if gate_up else None
        if gate_up is None or down is None:
            return None
        release([mlp.down_proj])
        return cls(gate_up, down)

    def add_output(self, x: mx.array, norm: Callable[[mx.array], mx.array]) -> mx.array:
        return x + self.communicator.sum(gated_products(self.formats, self.weights, norm(x)))

    def pin_exact(self, products: ExactProducts) -> None:
        """Raise, because a stage in exact mode keeps the reference."""
        raise NotImplementedError("a fused MLP has no exact mode")


def gated_products(formats: tuple[Format, Format], weights: tuple[Weights, Weights], x: mx.array) -> mx.array:
    """Return a gated MLP of `x [rows, hidden]`."""
    gate, up = mx.split(formats[0].multiply(x, weights[0]), 2, axis=-1)
    return formats[1].multiply(nn.silu(gate) * up, weights[1])


@dataclass(frozen=True)
class FusedEnds:
    """The products of a layer before and after its mixer, and of its MLP if that is fused. See `Ends`.

    `eps` is that of its norms. With `fuses_norm` a kernel adds the residual before the MLP and computes its norm.
    """

    inputs: Format
    out: Format
    mlp: tuple[Format, Format] | None
    eps: float
    fuses_norm: bool
    communicator: Communicator = ALONE
    most_rows: ClassVar[int] = 64

    def project(self, x: mx.array, arguments: Any) -> mx.array:
        """See `Ends`. The arguments are the weights of the norm and of the products."""
        norm, weights = arguments
        return self.inputs.multiply(mx.fast.rms_norm(x, norm, self.eps), weights)

    def finish(self, x: mx.array, y: mx.array, arguments: Any) -> mx.array:
        """See `Ends`. The arguments are the weights of the product, of the MLP's norm, and of the MLP."""
        out, norm, mlp = arguments
        y = self.communicator.sum(self.out.multiply(y, out))
        if self.mlp is None:
            return x + y
        x, normed = add_norm(x, y, norm, self.eps, self.fuses_norm)
        return x + self.communicator.sum(gated_products(self.mlp, mlp, normed))


def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float, own: bool) -> tuple[mx.array, mx.array]:
    """Return `x + y [rows, hidden]`, and its norm. `own` takes the kernel if all arrays have one type."""
    if not own or not x.dtype == y.dtype == weight.dtype:
        x = x + y
        return x, mx.fast.rms_norm(x, weight, eps)
    return add_and_norm(MetalKernel, x, (y,), weight, mx.array([eps]))
