"""Values off the wire: each of its type and in its range, or a ProtocolError that names it."""

from __future__ import annotations

import struct
from typing import Any

from proto.errors import ProtocolError

MAX_INT = 2**63 - 1
"""Of every integer but a seed: what a signed 64-bit integer of any language holds."""

MAX_TOKEN = 2**32 - 1


def check_int(value: Any, name: str, most: int = MAX_INT) -> int:
    """`value` when it is an integer in 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"{name} is an integer in 0 to {most}, got {_shown(value)}")
    return value


def check_float(value: Any, name: str) -> float:
    """`value` when it is a float and a number; an infinity is one, NaN is not."""
    if type(value) is not float or value != value:
        raise ProtocolError(f"{name} is a number, got {_shown(value)}")
    return value


def check_bool(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"{name} is true or false, got {_shown(value)}")
    return value


def check_str(value: Any, name: str) -> str:
    if type(value) is not str:
        raise ProtocolError(f"{name} is a string, got {_shown(value)}")
    return value


def check_list(value: Any, name: str, most: int) -> list[Any]:
    """`value` when it is a list of at most `most`."""
    if type(value) is not list or len(value) > most:
        raise ProtocolError(f"{name} is a list of at most {most}, got {_shown(value)}")
    return value


def check_row(value: Any, name: str, length: int) -> list[Any]:
    """`value` when it is a list of exactly `length`."""
    if type(value) is not list or len(value) != length:
        raise ProtocolError(f"{name} is a list of {length}, got {_shown(value)}")
    return value


def pack_tokens(tokens: tuple[int, ...], name: str) -> bytes:
    """Token ids as 32-bit little-endian integers: one copy to read, however long the prompt."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ProtocolError(f"{name} are integers in 0 to {MAX_TOKEN}") from error


def unpack_tokens(value: Any, name: str) -> tuple[int, ...]:
    """Inverse of `pack_tokens`."""
    if type(value) is not bytes or len(value) % 4:
        raise ProtocolError(f"{name} are 4 bytes each, got {_shown(value)}")
    return struct.unpack(f"<{len(value) // 4}I", value)


def _shown(value: Any) -> str:
    """For a message: a scalar as it is, cut short; of anything nested the type alone."""
    if isinstance(value, (list, dict, tuple, bytes)):
        return f"{type(value).__name__} of {len(value)}"
    return f"{value!r:.60}"
