"""CUDA kernels that MLX compiles from source, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from mtp.layers.source_kernel import SourceKernel

HALF_TYPES = (mx.bfloat16, mx.float16)
"""Types of activations that the tensor cores multiply."""


class CudaKernel(SourceKernel):
    """A CUDA kernel. MLX compiles it anew in each process, and keeps only its own kernels on disk."""

    most_rows = 32
    names: ClassVar[Mapping[str, str]] = {
        "$device ": "",
        "$shared ": "",
        "$array ": "__shared__ ",
        "$int64": "long long",
        "$span ": "const int* ",
    }

    def _compiled(self) -> Any:
        name, inputs, outputs, source, header = self._arguments
        return mx.fast.cuda_kernel(name, inputs, outputs, source, header)
