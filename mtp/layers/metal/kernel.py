"""Metal kernels that MLX compiles from source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from mtp.layers.source_kernel import SourceKernel

HEADER = """
#define __syncthreads() threadgroup_barrier(mem_flags::mem_threadgroup)
#define __shfl_xor_sync(all, value, mask) simd_shuffle_xor(value, mask)
#define __fmaf_rn(a, b, c) fma(a, b, c)
#define __fmul_rn(a, b) ((a) * (b))
#define make_float4(a, b, c, d) float4{a, b, c, d}
#define __uint_as_float(bits) as_type<float>(bits)
#define expf exp
#define log1pf log1p
#define rsqrtf rsqrt
#define sincosf(angle, sine, cosine) (*(sine) = sincos(angle, *(cosine)))
"""
"""The functions of CUDA that sources use, in Metal."""

PLACES = """
  const uint3 blockIdx = threadgroup_position_in_grid;
  const uint3 threadIdx = thread_position_in_threadgroup;
"""
"""The places of a thread by CUDA's names."""


class MetalKernel(SourceKernel):
    """A Metal kernel. Its sources have lambdas, which Metal knows from macOS 15 on."""

    most_rows = 8
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
        return mx.fast.metal_kernel(name, inputs, outputs, PLACES + source, HEADER + header)
