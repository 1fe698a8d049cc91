"""A part's weights as lazy MLX arrays, under our modules' names. A tensor is read when it is evaluated.

`mx.load` parses a file's header (1.3 KB for 16 tensors) and reads each tensor's own bytes on evaluation,
straight into MLX memory; nothing reads fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mtp.checkpoint.checkpoint import Checkpoint
from mtp.checkpoint.names import How, Source
from proto.errors import CheckpointError

_NEVER_CAST = ("A_log", "global_scale")
"""Parameters computed with in fp32 whatever the model's dtype; both are stored so."""

_Files = dict[Path, dict[str, mx.array]]


def read_part(checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None) -> dict[str, mx.array]:
    """Parameters of `part` by their name within it, not yet read.

    Floating ones are cast to `dtype` (None: as stored), quantization scales and biases among them, as
    mlx-lm's converter does; A_log is not. Only files that hold the part's tensors are opened.

    Raises CheckpointError when a tensor the part needs is not in the checkpoint.
    """
    if missing := checkpoint.missing_sources(part):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {missing[0]} is missing; {_and_more(missing)}"
        )
    files: _Files = {}
    return {
        name: _cast(name, _build(checkpoint, source, files), dtype)
        for name, source in checkpoint.plans[part].items()
    }


def _and_more(missing: tuple[str, ...]) -> str:
    more = f"and {len(missing) - 1} more are; " if len(missing) > 1 else ""
    return f"{more}download the checkpoint again, or convert it again"


def _build(checkpoint: Checkpoint, source: Source, files: _Files) -> mx.array:
    stored = [_load(checkpoint, name, files) for name in source.stored]
    if source.how == "stack":
        return mx.stack(stored)
    try:
        return _TRANSFORMS[source.how](stored[0])
    except (ValueError, IndexError) as error:
        file = checkpoint.tensors[source.stored[0]].file
        raise CheckpointError(
            f"{file}: tensor {source.stored[0]} has shape {stored[0].shape}: {error}"
        ) from error


def _load(checkpoint: Checkpoint, name: str, files: _Files) -> mx.array:
    file = checkpoint.tensors[name].file
    if file not in files:
        try:
            loaded = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{file}: {error}") from error
        assert isinstance(loaded, dict)
        files[file] = loaded
    return files[file][name]


def _shift(weight: mx.array) -> mx.array:
    """Raw norms store an offset from 1; in fp32, so that the sum is rounded once."""
    return (weight.astype(mx.float32) + 1.0).astype(weight.dtype)


def _half(which: int) -> Callable[[mx.array], mx.array]:
    """Gate is the first half of axis -2, up the second. Contiguous: kernels would copy a view each call."""
    return lambda fused: mx.contiguous(mx.split(fused, 2, axis=-2)[which])


_TRANSFORMS: dict[How, Callable[[mx.array], mx.array]] = {
    "as stored": lambda weight: weight,
    "conv1d": lambda weight: mx.contiguous(weight.moveaxis(2, 1)),
    "norm + 1": _shift,
    "gate half": _half(0),
    "up half": _half(1),
}


def _cast(name: str, weight: mx.array, dtype: mx.Dtype | None) -> mx.array:
    if dtype is None or name.endswith(_NEVER_CAST) or not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    return weight.astype(dtype)
