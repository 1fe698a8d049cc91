"""The conversion of hidden states to bytes and back, for dtypes that numpy lacks (bfloat16) too."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from proto.dtype import DTYPE_BYTES

_NAMES: dict[mx.Dtype, str] = {getattr(mx, name): name for name in DTYPE_BYTES}


def plain_view(x: mx.array) -> mx.array:
    """Return `x` as a type that numpy has. Evaluate it together with `x`, or `to_bytes` waits for the GPU once more."""
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x


def to_bytes(x: mx.array, plain: mx.array | None = None) -> tuple[str, tuple[int, ...], memoryview]:
    """Return the dtype's name, the shape and the buffer of `x`, whose `plain_view` is `plain` if it was evaluated.

    The buffer keeps the array alive. MLX copies `x` only to make it contiguous.
    """
    data = np.ascontiguousarray(np.array(plain_view(x) if plain is None else plain, copy=False))
    return _NAMES[x.dtype], tuple(x.shape), data.data.cast("B")


def from_bytes(dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> mx.array:
    """Invert `to_bytes`. Call it on the thread that computes with the result."""
    flat = np.frombuffer(data, dtype="uint16" if dtype == "bfloat16" else dtype).reshape(shape)
    array = mx.array(flat)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array
