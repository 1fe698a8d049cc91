"""Kernels that MLX compiles from source for a GPU.

A source is CUDA, and may have names that every language replaces. `$device` and `$shared` stand before a type to which
a pointer leads. `$array` declares memory of a block. `$int64` is an integer of 64 bits. `$span` is the type of a
pointer into an array of integers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx

log = logging.getLogger(__name__)

THREADS = 256
"""Threads of a block, unless a kernel says otherwise."""


class SourceKernel(ABC):
    """A kernel from source. MLX compiles it for each `template` when it first runs."""

    names: ClassVar[Mapping[str, str]]
    """The replacements of the names in a source."""
    most_rows: ClassVar[int]
    """Rows up to which it pays that each reads its weights by itself."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        source: str,
        header: str = "",
    ) -> None:
        for known, replacement in self.names.items():
            source = source.replace(known, replacement)
        self._arguments = (name, list(inputs), list(outputs), source, header)
        self._kernel: Any = None

    @abstractmethod
    def _compiled(self) -> Any:
        """Return MLX's function that runs the kernel."""

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
            self._kernel = self._compiled()
        outputs: list[mx.array] = self._kernel(
            inputs=list(inputs),
            template=list(template),
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )
        return outputs


@cache
def report_fallback(kernel: str, error: str) -> None:
    """Log, once for each kernel and cause, that slower operations replace a kernel of this project."""
    log.warning(
        "kernel unavailable, using the slower operations", extra={"kernel": kernel, "error": error}
    )
