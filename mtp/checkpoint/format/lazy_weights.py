"""A part's weights as lazy MLX arrays, under our modules' names. A tensor is read when it is evaluated.

`mx.load` parses a file's header (1.3 KB for 16 tensors) and reads each tensor's own bytes on evaluation,
straight into MLX memory; nothing reads fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import How, Source, few
from mtp.checkpoint.format.parts import check_types
from proto.errors import CheckpointError

_NEVER_CAST = ("A_log", "global_scale")
"""Parameters computed with in fp32 whatever the model's dtype; both are stored so."""

_UNREAD = ("F64", "F8_E5M2")
"""Types whose presence keeps MLX from reading any tensor of a file."""

_Files = dict[Path, dict[str, mx.array]]


def read_part(checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None) -> dict[str, mx.array]:
    """Parameters of `part` by their name within it, not yet read.

    Floating ones are cast to `dtype` (None: as stored), quantization scales and biases among them, as
    mlx-lm's converter does; A_log is not. Only files that hold the part's tensors are opened.

    Raises CheckpointError when a tensor the part needs is not in the checkpoint, or in a type it cannot have.
    """
    if missing := checkpoint.missing_sources(part):
        raise checkpoint.lacks(missing)
    check_types(checkpoint, part)
    files: _Files = {}
    weights = {}
    for name, source in checkpoint.plans[part].items():
        stored = [_load(checkpoint, tensor, files) for tensor in source.stored]
        made = mx.stack(stored) if source.how == "stack" else _make(checkpoint, source, stored[0])
        weights[name] = made.astype(_dtype(name, stored[0].dtype, dtype))
    return weights


def _make(checkpoint: Checkpoint, source: Source, stored: mx.array) -> mx.array:
    try:
        return _TRANSFORMS[source.how](stored)
    except (ValueError, IndexError) as error:
        name = source.stored[0]
        raise CheckpointError(
            f"{checkpoint.tensors[name].file}: tensor {name} has shape {stored.shape}: {error}"
        ) from error


def _load(checkpoint: Checkpoint, name: str, files: _Files) -> mx.array:
    file = checkpoint.tensors[name].file
    if file not in files:
        try:
            loaded = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            others = [
                n for n, i in checkpoint.tensors.items() if i.file == file and i.dtype in _UNREAD
            ]
            raise CheckpointError(
                f"{file}: MLX cannot read {few(others) or 'it'}: {error}; take the checkpoint as Qwen publishes "
                "it, or convert it again"
            ) from error
        assert isinstance(loaded, dict)
        files[file] = loaded
    return files[file][name]


def _shift(by: float) -> Callable[[mx.array], mx.array]:
    """Raw norms store an offset from 1. The sum stays in fp32 here, so that a cast rounds it once."""
    return lambda weight: weight.astype(mx.float32) + by


def _half(which: int) -> Callable[[mx.array], mx.array]:
    """Gate is the first half of axis -2, up the second. Contiguous: kernels would copy a view each call."""
    return lambda fused: mx.contiguous(mx.split(fused, 2, axis=-2)[which])


_TRANSFORMS: dict[How, Callable[[mx.array], mx.array]] = {
    "as stored": lambda weight: weight,
    "conv1d": lambda weight: mx.contiguous(weight.moveaxis(2, 1)),
    "norm + 1": _shift(1.0),
    "norm - 1": _shift(-1.0),
    "gate half": _half(0),
    "up half": _half(1),
}


def _dtype(name: str, stored: mx.Dtype, asked: mx.Dtype | None) -> mx.Dtype:
    """What a parameter stored as `stored` becomes: packed integers and the exceptions stay as they are."""
    if asked is None or name.endswith(_NEVER_CAST) or not mx.issubdtype(stored, mx.floating):
        return stored
    return asked
