"""Deterministic mutations of corpus inputs, without a library."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

MAX_BYTES = 64 * 1024
"""Bounds an input."""

SEPARATOR = b"\n--\n"
"""Separates the parts of an input, such as a path and a JSON body."""

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, "", "a", "\0", "\ud800", "é" * 300,
    "9" * 5000, "../../etc/passwd", "<|im_end|>", "<tool_call>", [], {}, [[]], [None], {"": {}}, "x" * 20_000,
)  # fmt: skip
"""Values of wrong types, sizes and ranges, which replace values in JSON."""


def mutate(seed: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return a changed copy of `seed`. Parts that are JSON are often changed by value instead of by byte."""
    if b"{" in seed and rng.random() < 0.6:
        parts = seed.split(SEPARATOR)
        index = rng.randrange(len(parts))
        if (changed := _mutate_json(parts[index], others, rng)) is not None:
            parts[index] = changed
            return SEPARATOR.join(parts)[:MAX_BYTES]
    return _mutate_bytes(seed, others, rng)


def _mutate_bytes(seed: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return a copy of `seed` with one to eight flips, insertions, deletions, repetitions or splices."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 8)):
        at = rng.randint(0, len(data))
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice(INTERESTING)
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 16)))
            case 3:
                del data[at : at + rng.choice((1, 1, 2, 4, 64))]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 64)] * rng.choice((1, 2, 50))
            case _:
                other = rng.choice(others)
                start = rng.randint(0, len(other))
                data[at:at] = other[start : start + rng.randint(0, 256)]
    return bytes(data[:MAX_BYTES])


def _mutate_json(part: bytes, others: list[bytes], rng: random.Random) -> bytes | None:
    """Return `part` with one to three values replaced, removed, nested or renamed; None if it is not JSON."""
    try:
        value = json.loads(part)
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.randint(1, 3)):
        value = _changed(value, others, rng)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return None


def _changed(value: Any, others: list[bytes], rng: random.Random) -> Any:
    """Return `value` with one random change at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                value.pop(key)
            case 1:
                value[rng.choice((key + "x", "", key.upper()))] = value.pop(key)
            case 2:
                value |= _object_in(rng.choice(others))
            case _:
                value[key] = _changed(value[key], others, rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                value.pop(index)
            case 1:
                value *= 2 if len(value) > 8 else rng.choice((2, 2, 20))
            case _:
                value[index] = _changed(value[index], others, rng)
        return value
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 2, 90))):
            value = [value]
        return value
    return copy.deepcopy(rng.choice(STRANGE))


def _object_in(data: bytes) -> dict[str, Any]:
    """Return the first JSON object among the parts of `data`, or an empty one."""
    for part in data.split(SEPARATOR):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}
