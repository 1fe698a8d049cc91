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


def repacked_bytes(
    source: Source, tensors: dict[str, TensorInfo], dtype: str, *, reorders: bool
) -> int | None:
    """Return the bytes of a packed weight after it was repacked, None when no format of MLX holds it.

    `dtype` is the safetensors name of the type of activations. `reorders` is true when the inputs of a group may not be
    adjacent. Experts have orders of their own then, which MLX cannot express. Reads no tensor. Raises CheckpointError
    for members that do not fit together or have an invalid type.
    """
    kinds = _kinds(source, tensors)
    if kinds is not None and not reorders:
        kinds = tuple(kind for kind in kinds if kind[0] != "order")
    elif source.transform == "stack" and "order" in source.members:
        return None
    if kinds is None:
        return 0  # loading refuses the missing tensors by name
    assert source.packing is not None
    try:
        found = _repacked_bytes(source.packing, kinds, dtype)
    except ValueError as error:
        raise _unreadable(source, error) from error
    if found is None:
        return None
    count = len(source.stored)
    return found // 2 if source.transform in ("gate half", "up half") else found * count


def weight_shape(source: Source, tensors: dict[str, TensorInfo]) -> Shape:
    """Return the shape of the dequantized first stored weight. Reads no tensor; raises what `repacked_bytes` raises."""
    kinds = _kinds(source, tensors)
    if source.packing is None or kinds is None:
        return tensors[source.stored[0]].shape
    try:
        return tuple(packed_values(source.packing, _zeros(kinds)).shape)
    except ValueError as error:
        raise _unreadable(source, error) from error


_Kinds = tuple[tuple[Member, str, Shape], ...]
"""The name, stored type and shape of each member of a packed weight."""


def _kinds(source: Source, tensors: dict[str, TensorInfo]) -> _Kinds | None:
    """Return the kinds of the first stored weight's members, None if one is missing."""
    names: dict[Member, str] = {"weight": source.stored[0]}
    names |= {member: stored[0] for member, stored in source.members.items()}
    found: list[tuple[Member, str, Shape]] = []
    for member, name in names.items():
        info = tensors.get(name)
        if info is None:
            return None
        if info.dtype not in _TYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name} is stored as {info.dtype}, which is invalid for a packed weight. "
                "Download the checkpoint again."
            )
        found.append((member, info.dtype, info.shape))
    return tuple(found)


@cache
def _repacked_bytes(packing: Packing, kinds: _Kinds, dtype: str) -> int | None:
    """Return the bytes of a repacked weight."""
    found = repack(packing, _zeros(kinds), _TYPES[dtype])
    if found is None:
        return None
    orders = [math.prod(shape) for member, _, shape in kinds if member == "order"]
    return sum(array.nbytes for array in found.values()) + 4 * sum(orders)


def _zeros(kinds: _Kinds) -> Members:
    """Return lazy zeros in place of all members but the order, whose values decide the result."""
    rank = len(next(shape for member, _, shape in kinds if member == "weight"))
    return {
        member: _with_rank(member, mx.zeros(shape, _TYPES[kind]), rank)
        for member, kind, shape in kinds
        if member != "order"
    }


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
