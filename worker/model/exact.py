"""Exact mode of a stage: its products are called with numbers of rows that have one arithmetic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from mtp.exact.arithmetic import Arithmetic
from mtp.exact.depthwise_taps import DepthwiseTaps, is_depthwise
from mtp.exact.range_probe import choose_range, narrowed
from mtp.exact.ranged_rows import RangedRows
from mtp.exact.row_range import EVERY, Product, RowRange, candidates
from mtp.head.packed_attention import PackedAttention
from mtp.kernels.cuda import report_fallback
from mtp.kernels.dense_rows import DenseRows, can_multiply_dense
from mtp.kernels.packed_linear import PackedLinear
from mtp.kernels.projections import SideBySide
from worker.model.loader import StageModules

log = logging.getLogger(__name__)

PROBE_ROWS = {"cpu": 9, "metal": 64, "cuda": 512}
"""Rows of the largest call that the probe tries. Many rows take seconds on a CPU, which has no ranges anyway."""

KERNEL_ROWS = 48
"""Rows of the largest call that is tried of this project's own kernel: more than it computes in one launch."""

QUERIES = {"cpu": None, "metal": 1, "cuda": 1}
"""Rows of one call of MLX's attention. Its kernels on GPUs depend on the rows and on the keys; with one row, the keys
alone decide, and a row's keys follow from its position."""

AFFINE = "affine"


class ExactProducts:
    """The row ranges of one stage's products. Products of equal shape and kind are probed once."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype = dtype
        self.arithmetic = Arithmetic.here()
        self.ranges: dict[tuple[Any, ...], RowRange] = {}
        self._kernels: dict[tuple[Any, ...], bool] = {}

    @property
    def queries(self) -> int | None:
        """Rows of one call of MLX's attention; None for any number."""
        return QUERIES[self.arithmetic.backend]

    def apply(self, modules: StageModules) -> None:
        """Replace the products of the layers and of the unembedding by `RangedRows`, and pin the packed ones.

        The MTP head stays as it is, because drafts do not change the answer. Raises UsageError if a product gives
        different bits in equal calls.
        """
        for layer in modules.layers:
            self._replace_children(layer)
        if modules.norm is not None:
            self._replace_unembedding(modules)
        for (product, *_), rows in self.ranges.items():
            log.info("exact mode", extra={"product": product.value, "calls": str(rows)})

    def _replace_unembedding(self, modules: StageModules) -> None:
        if modules.lm_head is not None:
            modules.lm_head = self._exact(modules.lm_head)
            return
        embedding = modules.embed_tokens
        assert embedding is not None, "a tied lm_head needs the embedding beside it"
        if isinstance(embedding, PackedLinear):
            embedding.one_arithmetic = True
            return
        if self._has_kernel(embedding):
            modules.lm_head = DenseRows(embedding.weight)
            return
        rows = self._range(embedding, embedding.as_linear)
        if rows != EVERY:
            modules.lm_head = RangedRows(embedding.as_linear, rows)

    def _replace_children(self, module: nn.Module) -> None:
        """Replace the products among the descendants of `module`."""
        for name, child in list(module.children().items()):
            if isinstance(child, list):
                module[name] = [self._exact(one) for one in child]
            elif isinstance(child, nn.Module):
                module[name] = self._exact(child)

    def _exact(self, module: Any) -> Any:
        """Return `module` with its products replaced, or what replaces `module` itself."""
        if isinstance(module, PackedLinear):
            module.one_arithmetic = True
            return module
        if self._has_kernel(module):
            return DenseRows(module.weight)
        if isinstance(module, SideBySide) and all(map(self._has_kernel, module.parts)):
            module.parts = [DenseRows(mx.concatenate([part.weight for part in module.parts]))]
            mx.eval(module.parts[0].weight)
            return module
        if isinstance(module, (nn.Linear, nn.QuantizedLinear, SwitchGLU)):
            rows = self._range(module, module)
            return module if rows == EVERY else RangedRows(module, rows)
        if isinstance(module, PackedAttention):
            module.one_arithmetic = True
        if self.arithmetic.backend != "cpu" and is_depthwise(module):
            return DepthwiseTaps(module)
        if isinstance(module, nn.Module):
            self._replace_children(module)
        return module

    def _has_kernel(self, module: Any) -> bool:
        """Return whether this project's own kernel computes a dense product, and gives every row the same bits."""
        if self.arithmetic.backend != "cuda" or not can_multiply_dense(module):
            return False
        key = (module.weight.shape, module.weight.dtype)
        if key not in self._kernels:
            inputs = list(_random_inputs(module, module, KERNEL_ROWS, self.dtype))
            try:
                found = narrowed(DenseRows(module.weight), inputs, RowRange(1, KERNEL_ROWS))
            except RuntimeError as error:  # whatever the compiler of a machine finds wrong
                report_fallback("dense_rows", str(error)[:500])
                found = None
            self._kernels[key] = found is not None and found.high == KERNEL_ROWS
        return self._kernels[key]

    def _range(self, module: Any, function: Callable[..., mx.array]) -> RowRange:
        """Return the range for a product, probed on its weights."""
        weights = module.gate_proj if isinstance(module, SwitchGLU) else module
        product = _product(module)
        key = (product, weights.weight.shape, weights.weight.dtype, getattr(weights, "bits", 0))
        if key not in self.ranges:
            rows = PROBE_ROWS[self.arithmetic.backend]
            inputs = list(_random_inputs(module, weights, rows, self.dtype))
            found = choose_range(function, inputs, candidates(self.arithmetic, product))
            self.ranges[key] = found
            mx.clear_cache()
        return self.ranges[key]


def _product(module: Any) -> Product:
    experts = isinstance(module, SwitchGLU)
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
    if isinstance(module, SwitchGLU):
        experts = weights.weight.shape[0]
        chosen = mx.argsort(mx.random.uniform(shape=(rows, experts), key=key), axis=-1)
        yield chosen[:, : min(8, experts)].astype(mx.uint32)
