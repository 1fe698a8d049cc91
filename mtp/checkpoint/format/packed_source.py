"""The weight of a packed Source: repacked in a format of MLX, or dequantized, and its size before it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import mlx.core as mx

from mtp.checkpoint.format.header import TensorInfo
from mtp.checkpoint.format.names import Source
from mtp.packing.packing import Member, Packing
from mtp.packing.repack import Members, packed_values, repack
from proto.dtype import STORED_NAMES
from proto.errors import CheckpointError

_TYPES = {
    **{stored: getattr(mx, name) for name, stored in STORED_NAMES.items()},
    "I8": mx.int8,
    "I32": mx.int32,
    "I64": mx.int64,
    "U8": mx.uint8,
    "U32": mx.uint32,
    "F8_E4M3": mx.uint8,
    "F8_E8M0": mx.uint8,
}
"""The types of packed weights, as `mx.load` returns them."""

Shape = tuple[int, ...]


def read_members(source: Source, load: Callable[[str], mx.array]) -> Members:
    """Return the members of a packed weight, loaded by their stored names. Experts are stacked."""
    names: dict[Member, tuple[str, ...]] = {"weight": source.stored, **source.members}
    found: Members = {}
    for member, stored in names.items():
        arrays = [load(name) for name in stored]
        if member != "weight":
            rank = load(source.stored[0]).ndim
            arrays = [_with_rank(member, array, rank) for array in arrays]
        found[member] = mx.stack(arrays) if source.transform == "stack" else arrays[0]
    return found


def repack_source(source: Source, members: Members, dtype: mx.Dtype) -> Members | None:
    """Return the parameters of the weight in a format of MLX, None when no format holds it.

    Raises CheckpointError for members that do not fit together.
    """
    assert source.packing is not None
    try:
        found = repack(source.packing, members, dtype)
    except ValueError as error:
        raise _unreadable(source, error) from error
    return None if found is None else _rows(source, found)


def dequantize_source(source: Source, members: Members) -> mx.array:
    """Return the weight in float32. Raises CheckpointError for members that do not fit together."""
    assert source.packing is not None
    try:
        values = packed_values(source.packing, members)
    except ValueError as error:
        raise _unreadable(source, error) from error
    return _rows(source, {"weight": values})["weight"]


def repacked_bytes(source: Source, tensors: dict[str, TensorInfo], dtype: str) -> int | None:
    """Return the bytes of a packed weight after it was repacked, None when no format of MLX holds it.

    `dtype` is the safetensors name of the type of activations. Reads no tensor. Raises CheckpointError for members that
    do not fit together or have an invalid type.
    """
    assert source.packing is not None
    names = {"weight": source.stored[0], **{m: n[0] for m, n in source.members.items()}}
    infos = {member: tensors[name] for member, name in names.items() if name in tensors}
    if len(infos) < len(names):
        return 0  # loading refuses the missing tensors by name
    for info, name in zip(infos.values(), names.values(), strict=True):
        if info.dtype not in _TYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name} is stored as {info.dtype}, which is invalid for a packed weight. "
                "Download the checkpoint again."
            )
    kinds = tuple((member, info.dtype, info.shape) for member, info in infos.items())
    try:
        found = _repacked_bytes(source.packing, kinds, dtype)
    except ValueError as error:
        raise _unreadable(source, error) from error
    if found is None:
        return None
    count = len(source.stored)
    return found // 2 if source.transform in ("gate half", "up half") else found * count


@cache
def _repacked_bytes(
    packing: Packing, kinds: tuple[tuple[str, str, Shape], ...], dtype: str
) -> int | None:
    """Return the bytes of a repacked weight with members of these types and shapes, by lazy arrays of zeros."""
    rank = len(next(shape for member, _, shape in kinds if member == "weight"))
    members = {
        member: _with_rank(member, mx.zeros(shape, _TYPES[kind]), rank)
        for member, kind, shape in kinds
        if member != "order"
    }
    found = repack(packing, members, _TYPES[dtype])
    if found is None:
        return None
    orders = [math.prod(shape) for member, _, shape in kinds if member == "order"]
    return sum(array.nbytes for array in found.values()) + 4 * sum(orders)


def _with_rank(member: str, array: mx.array, rank: int) -> mx.array:
    """Return a member with as many dimensions as its weight; scalars and vectors get one column."""
    if member == "order" or array.ndim == rank:
        return array
    if array.size == 1:
        return array.reshape((1,) * rank)
    return array.reshape(*array.shape, *(1,) * (rank - array.ndim))


def _rows(source: Source, parameters: Members) -> Members:
    """Return the half of all parameters with rows that a Source takes; 0 is the gate, 1 is up."""
    halves = {"gate half": 0, "up half": 1}
    if source.transform not in halves:
        return parameters
    rank, half = parameters["weight"].ndim, halves[source.transform]
    return {
        name: mx.contiguous(mx.split(array, 2, axis=-2)[half]) if array.ndim == rank else array
        for name, array in parameters.items()
    }


def _unreadable(source: Source, error: ValueError) -> CheckpointError:
    return CheckpointError(
        f"tensor {source.stored[0]} cannot be unpacked: {error}. Download the checkpoint again."
    )
