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

from mtp.layers.kernel_files import FILES, KernelText

log = logging.getLogger(__name__)

THREADS = 256
"""Threads of a block, unless a kernel says otherwise."""


class SourceKernel(ABC):
    """A kernel from source. MLX compiles it for each `template` when it first runs."""

    names: ClassVar[Mapping[str, str]]
    """The replacements of the names in a source."""
    most_rows: ClassVar[int]
    """Rows up to which it pays that each reads its weights by itself."""
    alone_rows: ClassVar[int]
    """Rows up to which MLX multiplies each with quantized weights as if it were alone."""

    def __init__(self, name: str, inputs: Sequence[str], outputs: Sequence[str], source: str, header: str = "") -> None:
        for known, replacement in self.names.items():
            source = source.replace(known, replacement)
        self._arguments = (name, list(inputs), list(outputs), source, header)
        self._kernel: Any = None
        self._prepared = set[tuple[tuple[str, Any], ...]]()

    @abstractmethod
    def _compiled(self) -> Any:
        """Return MLX's function that runs the kernel."""

    def _prepare(
        self, inputs: Sequence[mx.array], template: Sequence[tuple[str, Any]], dtypes: Sequence[mx.Dtype]
    ) -> None:
        """Prepare the first call with `template`."""
        return

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
        if (key := tuple(template)) not in self._prepared:
            self._prepare(inputs, key, dtypes)
            self._prepared.add(key)
        outputs: list[mx.array] = self._kernel(
            inputs=list(inputs),
            template=list(template),
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )
        return outputs


HALF_TYPES = (mx.bfloat16, mx.float16)
"""Types of activations that the tensor cores multiply."""


class CudaKernel(SourceKernel):
    """A CUDA kernel. MLX would compile it anew in each process, so `FILES` compiles it and keeps the result on disk."""

    most_rows = 32
    alone_rows = 7
    names: ClassVar[Mapping[str, str]] = {
        "$device ": "",
        "$shared ": "",
        "$array ": "__shared__ __align__(16) ",
        "$int64": "long long",
        "$span ": "const int* ",
    }

    def _compiled(self) -> Any:
        name, inputs, outputs, source, header = self._arguments
        return mx.fast.cuda_kernel(name, inputs, outputs, source, header)

    def _prepare(
        self, inputs: Sequence[mx.array], template: Sequence[tuple[str, Any]], dtypes: Sequence[mx.Dtype]
    ) -> None:
        """Put the compiled kernel where MLX looks. With other types of the inputs later, MLX compiles it itself."""
        FILES.provide(KernelText.compose(self._arguments, inputs, template, dtypes))


METAL_HEADER = """
#define __syncthreads() threadgroup_barrier(mem_flags::mem_threadgroup)
#define __shfl_xor_sync(all, value, mask) simd_shuffle_xor(value, mask)
#define __fmaf_rn(a, b, c) fma(a, b, c)
#define __fmul_rn(a, b) ((a) * (b))
#define make_float4(a, b, c, d) float4{a, b, c, d}
#define __uint_as_float(bits) as_type<float>(bits)
#define __float_as_uint(value) as_type<uint>(value)
#define atomicAdd(place, value) \
  atomic_fetch_add_explicit((threadgroup atomic_int*)(place), value, memory_order_relaxed)
#define expf exp
#define log1pf log1p
#define rsqrtf rsqrt
#define sincosf(angle, sine, cosine) (*(sine) = sincos(angle, *(cosine)))
"""
"""The functions of CUDA that sources use, in Metal."""

METAL_PLACES = """
  const uint3 blockIdx = threadgroup_position_in_grid;
  const uint3 threadIdx = thread_position_in_threadgroup;
"""
"""The places of a thread by CUDA's names."""


class MetalKernel(SourceKernel):
    """A Metal kernel. Its sources have lambdas, which Metal knows from macOS 15 on."""

    most_rows = 8
    alone_rows = 8
    names: ClassVar[Mapping[str, str]] = {
        "$device ": "device ",
        "$shared ": "threadgroup ",
        "$array ": "alignas(16) threadgroup ",
        "$int64": "long",
        # MLX passes arrays of fewer than 8 elements in another address space.
        "$span ": "auto ",
    }

    def _compiled(self) -> Any:
        name, inputs, outputs, source, header = self._arguments
        return mx.fast.metal_kernel(name, inputs, outputs, METAL_PLACES + source, METAL_HEADER + header)


@cache
def report_fallback(kernel: str, error: str) -> None:
    """Log, once for each kernel and cause, that slower operations replace a kernel of this project."""
    log.warning("kernel unavailable, using the slower operations", extra={"kernel": kernel, "error": error})
