"""CUDA kernels that MLX compiles from source, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

THREADS = 256
"""Threads of a block, unless a kernel says otherwise."""

HALF_TYPES = (mx.bfloat16, mx.float16)
"""Types of activations that the tensor cores multiply."""


class CudaKernel:
    """A kernel from source. MLX compiles it for each `template` when it first runs, and keeps the result on disk."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        source: str,
        header: str = "",
    ) -> None:
        self._arguments = (name, list(inputs), list(outputs), source, header)
        self._kernel: Any = None

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        blocks: tuple[int, int, int],
        threads: int = THREADS,
        template: Sequence[tuple[str, Any]],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Run `blocks` blocks of `threads` threads. Return outputs of `shapes` and `dtypes`."""
        if self._kernel is None:
            name, names, outputs, source, header = self._arguments
            self._kernel = mx.fast.cuda_kernel(name, names, outputs, source, header)
        outputs_: list[mx.array] = self._kernel(
            inputs=list(inputs),
            template=list(template),
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )
        return outputs_
