"""Checks for values of frames and messages. Each returns its value, or raises a ProtocolError that names it."""

from __future__ import annotations

import struct
from typing import Any

from proto.errors import ProtocolError

MAX_INT = 2**63 - 1
"""The largest integer of a frame, seeds excepted: what a signed 64-bit integer of any language holds."""

MAX_TOKEN = 2**32 - 1
"""The largest token id: tokens travel as unsigned 32-bit integers."""


def check_int(value: Any, name: str, most: int = MAX_INT) -> int:
    """Return `value` if it is an integer in 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"{name} is an integer in 0 to {most}, got {_shown(value)}")
    return value


def check_ints(values: tuple[Any, ...], names: tuple[str, ...]) -> None:
    """Raise ProtocolError unless all `values` are integers in 0 to MAX_INT.

    `names` are their names in the error. The last name is that of all further values.
    """
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_INT:
            index = next(i for i, one in enumerate(values) if one is value)
            name = names[min(index, len(names) - 1)]
            raise ProtocolError(f"{name} is an integer in 0 to {MAX_INT}, got {_shown(value)}")


def check_float(value: Any, name: str) -> float:
    """Return `value` if it is a float other than NaN; infinities are accepted."""
    if type(value) is not float or value != value:
        raise ProtocolError(f"{name} is a number, got {_shown(value)}")
    return value


def check_bool(value: Any, name: str) -> bool:
    """Return `value` if it is a bool."""
    if type(value) is not bool:
        raise ProtocolError(f"{name} is true or false, got {_shown(value)}")
    return value


def check_str(value: Any, name: str) -> str:
    """Return `value` if it is a string."""
    if type(value) is not str:
        raise ProtocolError(f"{name} is a string, got {_shown(value)}")
    return value


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


def check_tokens(tokens: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return `tokens` if all of them are token ids."""
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN):
        raise ProtocolError(f"{name} are integers in 0 to {MAX_TOKEN}")
    return tokens


def pack_tokens(tokens: tuple[int, ...], name: str) -> bytes:
    """Return token ids as 32-bit little-endian integers, so that a long prompt is read with one copy."""
    if not tokens:
        return b""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ProtocolError(f"{name} are integers in 0 to {MAX_TOKEN}") from error


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
