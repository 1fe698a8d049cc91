"""Checks of the kernels of few rows, in any language that this machine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.flash_next.modules import HyperConnection
from mtp.layers.expert_rows import RowExperts, computes
from mtp.layers.experts import JoinedExperts, join_experts
from mtp.layers.source_kernel import SourceKernel
from tests.unit.mtp.test_experts import block_of

TOLERANCE = {mx.bfloat16: 1e-2, mx.float16: 2e-3, mx.float32: 1e-5}
"""Difference from the reference over the largest value. Outputs are rounded to the type, states are fp32."""


def error(found: mx.array, expected: mx.array) -> float:
    """Return the largest difference over the largest expected value."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()  # type: ignore[return-value]


def check_experts(language: type[SourceKernel], dtype: mx.Dtype, rows: int) -> None:
    """Check that the chosen experts, their shares and the shared expert are those of MLX, and rows alone."""
    sizes = {"experts": 64, "inner": 192}
    block, exact = join_experts(block_of(4, dtype, **sizes)), block_of(4, dtype, **sizes)
    exact.set_dtype(mx.float32)
    exact = join_experts(exact)
    assert isinstance(block, JoinedExperts) and computes(block, dtype)
    # Rounded logits may choose others, so both take the same.
    exact.router = lambda x: block.router(x.astype(dtype)).astype(mx.float32)
    own = RowExperts(block, language)
    x = mx.random.normal((rows, 128), key=mx.random.key(rows)).astype(dtype)
    found = own(x)
    assert error(found, exact(x.astype(mx.float32))) < TOLERANCE[dtype]
    assert all(mx.array_equal(found[i : i + 1], own(x[i : i + 1])) for i in range(rows))


def check_streams(language: type[SourceKernel], dtype: mx.Dtype, rows: int) -> None:
    """Check that the sum with a block, its norm and the mean of the mixer are those of MLX's operations in fp32."""
    mx.random.seed(rows)
    args: Any = SimpleNamespace(width=4 * 192, streams=4, rank=64, eps=1e-6)
    own, exact = HyperConnection(args), HyperConnection(args)
    own.hc_norm.weight = mx.random.normal((args.width,))
    own.set_dtype(dtype)
    nn.quantize(own, 64, 4)
    nn.quantize(exact, 64, 4)
    exact.update(own.parameters())
    exact.set_dtype(mx.float32)
    for connection in (own, exact):
        connection.join()
    own.language = language
    x, block = (mx.random.normal((rows, n)).astype(dtype) for n in (args.width, 192))
    _, _, gates = own.mix(x)
    found = own.mix(x, (block, gates))
    wide = [held.astype(mx.float32) for held in (x, block, gates)]
    expected = exact.mix(wide[0], (wide[1], wide[2]))
    # The gates are MLX's product, which sums in `dtype` on a CPU.
    assert error(found[0], expected[0]) < TOLERANCE[dtype]
    assert error(found[1], expected[1]) < 2 * TOLERANCE[dtype]
