"""Exact mode: a row has the same bits with any rows beside it.

Each product is called with numbers of rows that have one arithmetic, by backend and by kind of weights. Sources of the
ranges. CUDA: measured on an H200 with mlx 0.32.4. Metal: read from the kernels of mlx 0.32.4 (`qmv`, `qmv_wide`,
`gemv`, `steel_gemm`), not measured. The CPU computes every row in the same way. `narrowed` checks every range on the
loaded weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from mtp.device import DEVICES, Arithmetic
from mtp.layers.source_kernel import report_fallback
from proto.errors import UsageError

log = logging.getLogger(__name__)

KERNEL_ROWS = 48
"""Rows of the largest call that is tried of this project's own kernel: more than it computes in one launch."""

PRODUCTS = (nn.Linear, nn.QuantizedLinear, SwitchGLU)
"""The modules of MLX and mlx-lm whose rows depend on the number of rows."""

AFFINE = "affine"


class Product(Enum):
    """Kinds of products with weights. Each has kernels of its own."""

    DENSE = "dense"
    AFFINE = "affine"
    """Integers of 2 to 8 bits with a scale and a bias for each group."""
    BLOCK_FLOAT = "block float"
    """mxfp4, nvfp4 and mxfp8."""
    DENSE_EXPERTS = "dense experts"
    QUANTIZED_EXPERTS = "quantized experts"


SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows of the calls in exact mode, and of the probe. Libraries of a GPU choose a kernel for each size by a
rule of their own, so a size that the probe has not tried is not used."""


@dataclass(frozen=True)
class RowRange:
    """Numbers of rows, both ends included. `high` None has no upper end."""

    low: int
    high: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of `SIZES` in this range, and its ends."""
        ends = {self.low} | ({self.high} if self.high else set())
        top = self.high or SIZES[-1]
        return tuple(sorted(ends | {size for size in SIZES if self.low <= size <= top}))

    def __str__(self) -> str:
        return f"{self.low} or more rows" if not self.high else f"{self.low} to {self.high} rows"


EVERY = RowRange(1, None)
"""Any number of rows."""

SINGLE = RowRange(1, 1)
"""One row at a time, which is exact wherever a kernel gives the same result twice."""

_CUDA = {
    Product.DENSE: (RowRange(2, 512), RowRange(2, 16)),
    Product.AFFINE: (RowRange(8, 512), RowRange(1, 7)),
    Product.BLOCK_FLOAT: (RowRange(8, 512), RowRange(1, 7)),
    Product.DENSE_EXPERTS: (RowRange(8, 64), RowRange(1, 7)),
    Product.QUANTIZED_EXPERTS: (RowRange(1, 64), RowRange(1, 7)),
}

_METAL_TO_M2 = {
    Product.DENSE: (),
    Product.AFFINE: (RowRange(1, 5),),
    Product.BLOCK_FLOAT: (RowRange(2, 11),),
    Product.DENSE_EXPERTS: (RowRange(1, 4),),
    Product.QUANTIZED_EXPERTS: (RowRange(1, 4),),
}

_METAL_FROM_M3 = _METAL_TO_M2 | {Product.DENSE: (RowRange(2, 5),), Product.AFFINE: (RowRange(2, 11),)}

LAST_OF_NARROW_KERNELS = 14
"""Generation of M2. From M3 on, MLX multiplies 2 to 11 rows by a kernel of their own."""


def candidates(arithmetic: Arithmetic, product: Product) -> Sequence[RowRange]:
    """Return the ranges to try for `product`, the cheapest first. The last one is `SINGLE` on a GPU."""
    if arithmetic.backend == "cpu":
        return (EVERY,)
    if arithmetic.backend == "cuda":
        return (*_CUDA[product], SINGLE)
    generation = arithmetic.generation
    narrow = generation is not None and generation <= LAST_OF_NARROW_KERNELS
    return (*(_METAL_TO_M2 if narrow else _METAL_FROM_M3)[product], SINGLE)


Rows = Callable[..., mx.array]


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Return whether two arrays of one type have the same bits."""
    kind = {2: mx.uint16, 4: mx.uint32}[a.itemsize]
    return a.dtype == b.dtype and bool(mx.array_equal(a.view(kind), b.view(kind)).item())


def narrowed(function: Rows, inputs: Sequence[mx.array], rows: RowRange) -> RowRange | None:
    """Return the part of `rows` that holds for `function`, from its lower end on, or None if not even that holds.

    `inputs` are arrays of equally many rows, at least `rows.low`, which limit the sizes that are tried. A size holds
    when each of its rows has the bits that it has in a call of `rows.low` rows, at whatever place.
    """
    most = inputs[0].shape[0]
    low = rows.low
    parts = [function(*[x[start : start + low] for x in inputs]) for start in range(0, most - low + 1, low)]
    expected = mx.concatenate(parts)
    shifted = function(*[mx.roll(x[:low], 1, 0) for x in inputs])
    if not same_bits(mx.roll(shifted, -1, 0), expected[:low]):
        return None
    high = low
    top = most if rows.high is None else min(rows.high, most)
    for size in RowRange(low, top).sizes[1:]:
        known = min(size, expected.shape[0])
        if not same_bits(function(*[x[:size] for x in inputs])[:known], expected[:known]):
            return RowRange(low, high)
        high = size
    return rows


def choose_range(function: Rows, inputs: Sequence[mx.array], ranges: Sequence[RowRange]) -> RowRange:
    """Return the first of `ranges` that holds, narrowed to what holds.

    Raises UsageError if `function` gives different bits for the same row in equal calls.
    """
    for rows in ranges:
        found = narrowed(function, inputs, rows)
        if found is not None:
            return found
    raise UsageError(
        "a product gives different bits in equal calls on this machine, so --exact is impossible here. "
        "Leave out --exact"
    )


class RangedRows(nn.Module):
    """A row-wise function that is called with the sizes of one range only.

    More rows are cut into calls. A call that is not full is padded by repeating its last row.
    """

    def __init__(self, inner: Callable[..., mx.array], rows: RowRange) -> None:
        super().__init__()
        self.inner = inner
        self.rows = rows

    def __call__(self, *inputs: mx.array) -> mx.array:
        """Return `inner` of `inputs`, each `[rows, …]`: `[rows, …]`."""
        count = inputs[0].shape[0]
        parts = cuts(count, self.rows)
        if parts == [(0, count, count)]:
            return self.inner(*inputs)
        outputs = [self._call([x[start:stop] for x in inputs], size - (stop - start)) for start, stop, size in parts]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _call(self, inputs: list[mx.array], missing: int) -> mx.array:
        if not missing:
            return self.inner(*inputs)
        padded = [mx.concatenate([x, mx.repeat(x[-1:], missing, axis=0)]) for x in inputs]
        return self.inner(*padded)[: inputs[0].shape[0]]


def cuts(count: int, rows: RowRange) -> list[tuple[int, int, int]]:
    """Return the start, the end and the size of each call for `count` rows: few calls, and little padding."""
    if rows.high is None:
        return [(0, count, count)]
    sizes, found, start = rows.sizes, [], 0
    while start < count:
        left = count - start
        full = max((size for size in sizes if size <= left), default=0)
        wider = next((size for size in sizes if size >= left), 0)
        # Padding costs less than another call, up to a quarter of the rows.
        if not full or (wider and wider <= max(left + 4, left * 5 // 4)):
            full = wider
        found.append((start, min(start + full, count), full))
        start += full
    return found


class DepthwiseTaps(nn.Module):
    """A causal depthwise convolution without bias, computed element by element.

    Libraries of a GPU choose an algorithm for a convolution by its length and its batch. This sum has one order.
    """

    def __init__(self, convolution: nn.Conv1d) -> None:
        super().__init__()
        self.weight = convolution.weight

    def __call__(self, x: mx.array) -> mx.array:
        """Return the convolution of `x [n, width + taps - 1, channels]`: `[n, width, channels]`, summed in fp32."""
        taps = self.weight.shape[1]
        width = x.shape[1] - taps + 1
        y = mx.zeros((1,), mx.float32)
        for tap in range(taps):
            part = x[:, tap : tap + width].astype(mx.float32)
            y = y + part * self.weight[:, tap, 0].astype(mx.float32)
        return y.astype(x.dtype)


def is_depthwise(module: object) -> bool:
    """Return whether `DepthwiseTaps` computes `module`: one group for each channel, stride 1, no padding, no bias."""
    return (
        type(module) is nn.Conv1d
        and module.groups == module.weight.shape[0]
        and (module.stride, module.padding, module.dilation) == (1, 0, 1)
        and "bias" not in module
    )


class DenseKernel(Protocol):
    """A kernel of this project for dense products, whose rows have the same bits beside any other rows."""

    def computes(self, module: Any) -> bool:
        """Return whether the kernel multiplies with the weights of a linear layer or an embedding."""

    def __call__(self, weight: mx.array) -> nn.Module:
        """Return the product with `weight [N, K]` as a module."""


class ExactProducts:
    """The row ranges of one stage's products. Products of equal shape and kind are probed once.

    `kernel` computes dense products where the device has one.
    """

    def __init__(self, dtype: mx.Dtype, kernel: DenseKernel | None = None) -> None:
        self.dtype = dtype
        self.kernel = kernel
        self.arithmetic = Arithmetic.here()
        self.device = DEVICES[self.arithmetic.backend]
        self.ranges: dict[tuple[Any, ...], RowRange] = {}
        self._kernels: dict[tuple[Any, ...], bool] = {}

    @property
    def queries(self) -> int | None:
        """Rows of one call of MLX's attention; None for any number."""
        return self.device.exact_queries

    def log_ranges(self) -> None:
        """Log the range of each product."""
        for (product, *_), rows in self.ranges.items():
            log.info("exact mode", extra={"product": product.value, "calls": str(rows)})

    def tied_unembedding(self, embedding: Any) -> Any:
        """Return the lm_head that replaces a tied embedding, or None if the embedding itself is exact."""
        if (pin := getattr(embedding, "pin_exact", None)) is not None:
            pin(self)
            return None
        if (kernel := self._kernel_for(embedding)) is not None:
            return kernel(embedding.weight)
        rows = self._range(embedding, embedding.as_linear)
        return None if rows == EVERY else RangedRows(embedding.as_linear, rows)

    def replace_children(self, module: nn.Module) -> None:
        """Replace the products among the descendants of `module`."""
        for name, child in list(module.children().items()):
            if isinstance(child, list):
                module[name] = [self.replaced(one) for one in child]
            elif isinstance(child, nn.Module):
                module[name] = self.replaced(child)

    def replaced(self, module: Any) -> Any:
        """Return `module` with its products replaced, or what replaces `module` itself.

        Raises UsageError if a product gives different bits in equal calls.
        """
        if (pin := getattr(module, "pin_exact", None)) is not None:
            return pin(self)
        if (kernel := self._kernel_for(module)) is not None:
            return kernel(module.weight)
        if type(module) in PRODUCTS:
            rows = self._range(module, module)
            return module if rows == EVERY else RangedRows(module, rows)
        if not self.device.computes_on_host and is_depthwise(module):
            return DepthwiseTaps(module)
        if isinstance(module, nn.Module):
            self.replace_children(module)
        return module

    def fused_rows(self, modules: Sequence[Any]) -> nn.Module | None:
        """Return dense products side by side as one of a kernel with one arithmetic, or None if there is none."""
        kernels = [self._kernel_for(module) for module in modules]
        if (kernel := kernels[0]) is None or None in kernels:
            return None
        fused = kernel(mx.concatenate([module.weight for module in modules]))
        mx.eval(fused.weight)
        return fused

    def _kernel_for(self, module: Any) -> DenseKernel | None:
        """Return this project's own kernel if it computes a dense product, and gives every row the same bits."""
        kernel = self.kernel
        if kernel is None or not kernel.computes(module):
            return None
        key = (module.weight.shape, module.weight.dtype)
        if key not in self._kernels:
            inputs = list(_random_inputs(module, module, KERNEL_ROWS, self.dtype))
            try:
                found = narrowed(kernel(module.weight), inputs, RowRange(1, KERNEL_ROWS))
            except RuntimeError as error:  # whatever the compiler of a machine finds wrong
                report_fallback("dense_rows", str(error)[:500])
                found = None
            self._kernels[key] = found is not None and found.high == KERNEL_ROWS
        return kernel if self._kernels[key] else None

    def _range(self, module: Any, function: Callable[..., mx.array]) -> RowRange:
        """Return the range for a product, probed on its weights."""
        weights = module.gate_proj if type(module) is SwitchGLU else module
        product = _product(module)
        key = (product, weights.weight.shape, weights.weight.dtype, getattr(weights, "bits", 0))
        if key not in self.ranges:
            rows = self.device.exact_probe_rows
            inputs = list(_random_inputs(module, weights, rows, self.dtype))
            found = choose_range(function, inputs, candidates(self.arithmetic, product))
            self.ranges[key] = found
            mx.clear_cache()
        return self.ranges[key]


def _product(module: Any) -> Product:
    experts = type(module) is SwitchGLU
    weights = module.gate_proj if experts else module
    if "scales" not in weights:
        return Product.DENSE_EXPERTS if experts else Product.DENSE
    if experts:
        return Product.QUANTIZED_EXPERTS
    return Product.AFFINE if weights.mode == AFFINE else Product.BLOCK_FLOAT


def _random_inputs(module: Any, weights: Any, rows: int, dtype: mx.Dtype) -> Iterator[mx.array]:
    """Yield the inputs of a product for `rows` rows: random numbers, and experts where it takes them."""
    width = weights.weight.shape[-1]
    if "scales" in weights:
        width = weights.scales.shape[-1] * weights.group_size
    key = mx.random.key(1)
    yield mx.random.normal((rows, width), key=key).astype(dtype)
    if type(module) is SwitchGLU:
        experts = weights.weight.shape[0]
        chosen = mx.argsort(mx.random.uniform(shape=(rows, experts), key=key), axis=-1)
        yield chosen[:, : min(8, experts)].astype(mx.uint32)
