"""The conversion of hidden states to bytes and back, for dtypes that Python lacks (bfloat16) too."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from proto.dtype import DTYPE_BYTES

NO_TENSOR: tuple[str, tuple[int, ...], memoryview | bytes] = ("", (), b"")
"""The dtype, the shape and the bytes of a frame without hidden states."""

_DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in DTYPE_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def plain_view(x: mx.array) -> mx.array:
    """Return `x` as a type that Python has. Evaluate both together, or `to_bytes` waits for the GPU once more."""
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x


def to_bytes(x: mx.array, plain: mx.array | None = None) -> tuple[str, tuple[int, ...], memoryview]:
    """Return the dtype's name, the shape and the buffer of `x`, whose `plain_view` is `plain` if it was evaluated.

    The buffer keeps the array alive. MLX copies `x` only to make it contiguous.
    """
    array: Any = plain_view(x) if plain is None else plain  # it has the buffer protocol
    data = memoryview(array)
    if not data.c_contiguous:
        data = np.ascontiguousarray(data).data
    return _NAMES[x.dtype], x.shape, data.cast("B")


def from_bytes(dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> mx.array:
    """Invert `to_bytes`. Call it on the thread that computes with the result."""
    is_float = dtype == "float32"
    plain: Any = memoryview(data).cast("f" if is_float else "H", shape)
    array = mx.array(plain)
    return array if is_float else array.view(_DTYPES[dtype])
