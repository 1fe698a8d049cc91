"""The weights of a part as lazy MLX arrays, under the names of our modules. Evaluating an array reads its tensor.

`mx.load` parses the header of a file (1.3 KB for 16 tensors). On evaluation it reads only the bytes of the tensor,
directly into MLX memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import Source, Transform, join_names
from mtp.checkpoint.format.packed_source import dequantize_source, read_members, repack_source
from mtp.checkpoint.format.parts import check_types
from proto.errors import CheckpointError

_NEVER_CAST = ("A_log", "global_scale", "output_scale")
"""Endings of the parameters that stay in fp32, whatever the model's dtype."""

_UNREAD = ("F64", "F8_E5M2")
"""Types that MLX does not support. MLX reads no tensor of a file that contains one of them."""

_Files = dict[Path, dict[str, mx.array]]


def read_part(
    checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None, *, dequantize: bool = False
) -> dict[str, mx.array]:
    """Return the lazy parameters of `part` by their name within it.

    Floating parameters are cast to `dtype` (None: as stored), as mlx-lm's converter casts them. Quantization scales
    and biases are cast too; A_log is not. Only the files that hold tensors of the part are opened. A packed weight is
    repacked where MLX has its format, or else dequantized. `dequantize` dequantizes all of them.

    Raises CheckpointError when the checkpoint lacks a tensor of the part, or stores it in an invalid type.
    """
    if missing := checkpoint.missing_sources(part):
        raise checkpoint.missing_tensors_error(missing)
    check_types(checkpoint, part)
    files: _Files = {}
    weights: dict[str, mx.array] = {}
    for name, source in checkpoint.plans[part].items():
        if source.packing is not None:
            members = read_members(source, lambda stored: _load(checkpoint, stored, files))
            wanted = dtype or getattr(mx, checkpoint.activation_dtype)
            found = None if dequantize else repack_source(source, members, wanted)
            if found is None:
                found = {"weight": dequantize_source(source, members).astype(wanted)}
            module = name.removesuffix("weight")
            weights |= {f"{module}{leaf}": array for leaf, array in found.items()}
            continue
        stored = [_load(checkpoint, tensor, files) for tensor in source.stored]
        made = (
            mx.stack(stored)
            if source.transform == "stack"
            else _make(checkpoint, source, stored[0])
        )
        weights[name] = made.astype(_dtype(name, stored[0].dtype, dtype))
    return weights


def read_values(checkpoint: Checkpoint, source: Source) -> mx.array:
    """Return the lazy values of a packed weight in float32."""
    files: _Files = {}
    return dequantize_source(source, read_members(source, lambda n: _load(checkpoint, n, files)))


def _make(checkpoint: Checkpoint, source: Source, stored: mx.array) -> mx.array:
    try:
        return _TRANSFORMS[source.transform](stored)
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
                f"{file}: MLX cannot read {join_names(others) or 'it'}: {error}. Use the checkpoint that Qwen "
                "publishes, or convert it again."
            ) from error
        assert isinstance(loaded, dict)
        files[file] = loaded
    return files[file][name]


def _shift(by: float) -> Callable[[mx.array], mx.array]:
    """Return the transform that adds `by` in fp32, so that the later cast rounds only once."""
    return lambda weight: weight.astype(mx.float32) + by


def _half(which: int) -> Callable[[mx.array], mx.array]:
    """Return the transform that takes one half of axis -2: 0 is the gate, 1 is up.

    The half is made contiguous, since kernels would copy a view at each call.
    """
    return lambda fused: mx.contiguous(mx.split(fused, 2, axis=-2)[which])


_TRANSFORMS: dict[Transform, Callable[[mx.array], mx.array]] = {
    "as stored": lambda weight: weight,
    "conv1d": lambda weight: mx.contiguous(weight.moveaxis(2, 1)),
    "norm + 1": _shift(1.0),
    "norm - 1": _shift(-1.0),
    "gate half": _half(0),
    "up half": _half(1),
}


def _dtype(name: str, stored: mx.Dtype, asked: mx.Dtype | None) -> mx.Dtype:
    """Return the dtype of a loaded parameter; packed integers and the names of _NEVER_CAST keep `stored`."""
    if asked is None or name.endswith(_NEVER_CAST) or not mx.issubdtype(stored, mx.floating):
        return stored
    return asked
