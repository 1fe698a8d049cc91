"""Hidden states as bytes and back, without going through a dtype numpy lacks (bfloat16)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from proto.dtype import DTYPE_BYTES

_NAMES: dict[mx.Dtype, str] = {getattr(mx, name): name for name in DTYPE_BYTES}


def to_bytes(x: mx.array) -> tuple[str, tuple[int, ...], memoryview]:
    """dtype name, shape and buffer of `x`, evaluated. The buffer keeps the array alive; nothing is copied
    beyond what MLX needs to make `x` contiguous."""
    name = _NAMES[x.dtype]
    plain = x.view(mx.uint16) if name == "bfloat16" else x
    data = np.ascontiguousarray(np.array(plain, copy=False))
    return name, tuple(x.shape), data.data.cast("B")


def from_bytes(dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> mx.array:
    """Inverse of `to_bytes`; must run on the thread that computes with the result."""
    flat = np.frombuffer(data, dtype="uint16" if dtype == "bfloat16" else dtype).reshape(shape)
    array = mx.array(flat)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array
