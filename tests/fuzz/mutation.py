"""Deterministic mutations of corpus inputs, without a library."""

from __future__ import annotations

import random

MAX_BYTES = 64 * 1024
"""Bounds an input."""

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


def mutate(seed: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return a changed copy of `seed`: one to eight flips, insertions, deletions, repetitions or splices."""
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
