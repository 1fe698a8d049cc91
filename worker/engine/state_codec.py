"""The codec of a layer's state: the bytes that backups, blocks on disk and transfers between workers have in common.

A state is a list of arrays in msgpack, each with its type, shape and bits. All code of this module runs on the engine
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import msgpack
import numpy as np

from mtp.device import this_device
from mtp.head.drafter import HeadState
from mtp.layers.layer import Member
from proto.errors import ProtocolError
from proto.wire import STATE_NAMES

_DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in STATE_NAMES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

PIECE_BYTES = 2**23
"""Bytes of a piece of a state. The engine thread copies one at a time beside frames."""

HEAD_BYTES = 128
"""Bound of the bytes before the bits of an array."""

_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""Bytes of the length of msgpack's kinds of bytes."""

Bytes = bytes | bytearray

Arrays = list[mx.array]

Stored = Arrays | tuple[Arrays, ...]
"""A decoded state: the arrays of this member, or the shares of all members of another group."""


def encode_arrays(arrays: Sequence[mx.array]) -> Iterator[Any]:
    """Yield the bytes of a state in buffers of at most PIECE_BYTES. Some are arrays, perhaps unfinished."""
    packer = msgpack.Packer()
    yield packer.pack_array_header(len(arrays))
    for array in arrays:
        begin = packer.pack_array_header(3) + packer.pack(type_name(array)) + packer.pack([*array.shape])
        yield begin + b"\xc6" + array.nbytes.to_bytes(4, "big")
        flat, step = array.reshape(-1), PIECE_BYTES // array.itemsize
        for first in range(0, flat.size, step):
            yield host_array(flat[first : first + step])


def joined_bytes(arrays: Sequence[mx.array]) -> bytes:
    """Return the bytes of a state."""
    pieces = [*encode_arrays(arrays)]
    mx.eval([piece for piece in pieces if isinstance(piece, mx.array)])
    return b"".join(piece if isinstance(piece, bytes) else memoryview(piece).cast("B") for piece in pieces)


def decode_arrays(data: Bytes) -> Arrays:
    """Return the arrays of a state. Raises ProtocolError for bytes of another form."""
    try:
        return [array_of(*wire) for wire in _split_arrays(memoryview(data))]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed backup of a layer: {error}") from error


def decode_state(shares: Sequence[Bytes], member: Member, *, own: bool = False) -> Stored:
    """Return the state whose `shares` the members of one group made, or one that is this member's `own`."""
    if not own and len(shares) != member.size:
        return tuple(map(decode_arrays, shares))
    return decode_arrays(shares[0 if own else member.rank])


def _split_arrays(data: memoryview) -> Iterator[tuple[str, list[int], memoryview]]:
    """Yield the type, the shape and the bits of each array. msgpack would copy the bits."""
    reader = msgpack.Unpacker()
    reader.feed(data[:HEAD_BYTES])
    count, at = reader.read_array_header(), reader.tell()
    for _ in range(count):
        reader = msgpack.Unpacker()
        reader.feed(data[at : at + HEAD_BYTES])
        if reader.read_array_header() != 3:
            raise ValueError("an array has other fields")
        name, shape = reader.unpack(), reader.unpack()
        at += reader.tell()
        end = at + 1 + _LENGTHS[data[at]]
        nbytes = int.from_bytes(data[at + 1 : end], "big")
        yield name, shape, data[end : end + nbytes]
        at = end + nbytes
    if at != len(data):
        raise ValueError("another length")


# ---- the state of the MTP head


def head_arrays(head: HeadState) -> list[mx.array]:
    """Return the state of the MTP head as arrays, of which the first has its numbers."""
    held = head.cache.backup_arrays(0) if head.cache.offset else []
    newest = [] if head.newest is None else [head.newest]
    waiting = [mx.concatenate(head.waiting_hidden)] if head.waiting_hidden else []
    counts = head.cache.offset, len(held), head.waiting_tokens, len(newest), head.successor
    numbers = mx.array(np.frombuffer(msgpack.packb(counts), np.uint8))
    return [numbers, *held, *newest, *waiting]


def head_from(stored: Stored, empty: HeadState, member: Member) -> HeadState:
    """Return the state of the head in `stored`. Raises ProtocolError if it is malformed."""
    try:
        numbers, *arrays = stored if isinstance(stored, list) else stored[0]  # as on all members, but for the heads
        offset, count, tokens, newest, successor = msgpack.unpackb(np.array(numbers).tobytes())
        own, rest = arrays[:count], arrays[count:]
        if own and isinstance(stored, tuple):
            own = [*empty.cache.own_share([share[1 : 1 + count] for share in stored], member)]
        cache = empty.cache.with_backups([own], offset) if own else empty.cache
        found = rest.pop(0) if newest else None
        return HeadState(cache, found, successor, rest, [int(token) for token in tokens])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ProtocolError(f"malformed backup of the MTP head: {error}") from error


# ---- arrays


def plain_array(array: mx.array) -> mx.array:
    """Return `array` as a type that numpy has. Evaluate both together, or `to_bytes` waits for the GPU once more."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def host_array(array: mx.array) -> mx.array:
    """Return the bits of `array` for numpy. On CUDA a read moves memory that others may share, so they are a copy."""
    plain = plain_array(array)
    if this_device().backend != "cuda":
        return plain
    words = plain.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[plain.itemsize])
    return mx.bitwise_or(words, mx.array(0, words.dtype))


def type_name(array: mx.array) -> str:
    """Return the name of an array's type on the wire and on disk."""
    return _NAMES[array.dtype]


def array_of(name: str, shape: Sequence[int], data: Any) -> mx.array:
    """Return the array of type `name` in the buffer `data`."""
    dtype = _DTYPES[name]
    plain = "uint16" if dtype == mx.bfloat16 else name
    array = mx.array(np.frombuffer(data, dtype=plain).reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array
