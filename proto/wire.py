"""The types of tensors, and checks of the values that arrive from other machines."""

from __future__ import annotations

import struct
from typing import Any

from proto.errors import ProtocolError

STORED_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2,
    "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the name that safetensors headers use."""

STORED_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The activation types that stages can compute in, and the name of each in safetensors headers."""

STATE_NAMES = {**STORED_NAMES, "uint32": "U32", "uint8": "U8"}
"""The types of states and of converted weights: packed ones are uint32, and the numbers of an MTP head are bytes."""

DTYPE_BYTES = {name: STORED_BYTES[stored] for name, stored in STORED_NAMES.items()}
"""Bytes of one element of each activation type."""

MAX_INT = 2**63 - 1
"""The largest integer of a frame, seeds excepted: what a signed 64-bit integer of any language holds."""

MAX_TOKEN = 2**32 - 1
"""The largest token id: tokens travel as unsigned 32-bit integers."""


def check_int(value: Any, name: str, most: int = MAX_INT) -> None:
    """Raise ProtocolError unless `value` is an integer in 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"{name} is an integer in 0 to {most}, got {_shown(value)}")


def check_ints(values: tuple[Any, ...], names: tuple[str, ...]) -> None:
    """Raise ProtocolError unless `values` are integers in 0 to MAX_INT. The last of their `names` may repeat."""
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_INT:
            index = next(i for i, one in enumerate(values) if one is value)
            check_int(value, names[min(index, len(names) - 1)])


def check_float(value: Any, name: str) -> None:
    """Raise ProtocolError unless `value` is a float other than NaN. Infinities are accepted."""
    if type(value) is not float or value != value:
        raise ProtocolError(f"{name} is a number, got {_shown(value)}")


def check_type(value: Any, kind: type, name: str) -> None:
    """Raise ProtocolError unless the type of `value` is `kind`."""
    if type(value) is not kind:
        raise ProtocolError(f"{name} is of type {kind.__name__}, got {_shown(value)}")


def check_list(value: Any, name: str, most: int) -> list[Any]:
    """Return `value` if it is a list of at most `most` elements."""
    if type(value) is not list or len(value) > most:
        raise ProtocolError(f"{name} is a list of at most {most}, got {_shown(value)}")
    return value


def check_row(value: Any, name: str, length: int) -> list[Any]:
    """Return `value` if it is a list of exactly `length` elements."""
    if type(value) is not list or len(value) != length:
        raise ProtocolError(f"{name} is a list of {length}, got {_shown(value)}")
    return value


def check_tokens(tokens: tuple[int, ...], name: str) -> None:
    """Raise ProtocolError unless all `tokens`, of which there is at least one, are token ids."""
    if not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN):
        raise ProtocolError(f"{name} are integers in 0 to {MAX_TOKEN}")


def pack_tokens(tokens: tuple[int, ...]) -> bytes:
    """Return token ids as 32-bit little-endian integers, so that a long prompt is read with one copy."""
    return struct.pack(f"<{len(tokens)}I", *tokens) if tokens else b""


def unpack_tokens(value: Any, name: str) -> tuple[int, ...]:
    """Invert `pack_tokens`."""
    if type(value) is not bytes or len(value) % 4:
        raise ProtocolError(f"{name} are 4 bytes each, got {_shown(value)}")
    return struct.unpack(f"<{len(value) // 4}I", value) if value else ()


def _shown(value: Any) -> str:
    """Return `value` for an error message: a scalar shortened, a container as its type and length."""
    if isinstance(value, (list, dict, tuple, bytes)):
        return f"{type(value).__name__} of {len(value)}"
    return f"{value!r:.60}"
