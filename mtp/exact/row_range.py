"""The numbers of rows for which a product has one arithmetic, by backend and by kind of weights.

Sources. CUDA: measured on an H200 with mlx 0.32.4, as `python -m tests.bench.row_ranges` does. Metal: read from the
kernels of mlx 0.32.4 (`qmv`, `qmv_wide`, `gemv`, `steel_gemm`), not measured. The CPU computes every row in the same
way. `narrowed` in `mtp.exact.range_probe` checks every range on the loaded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mtp.exact.arithmetic import Arithmetic


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
        return (
            f"{self.low} or more rows" if self.high is None else f"{self.low} to {self.high} rows"
        )


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

_METAL_FROM_M3 = {
    Product.DENSE: (RowRange(2, 5),),
    Product.AFFINE: (RowRange(2, 11),),
    Product.BLOCK_FLOAT: (RowRange(2, 11),),
    Product.DENSE_EXPERTS: (RowRange(1, 4),),
    Product.QUANTIZED_EXPERTS: (RowRange(1, 4),),
}

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
