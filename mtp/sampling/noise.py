"""Counter-based noise: every random number is a function of (seed, position, stream), and of nothing else.

There is no generator with a state that could be behind or ahead, so a token drawn in a window of five, alone,
on another machine after a failure, or a second time after a rollback is drawn from the same noise (DESIGN §6).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import mlx.core as mx

MASK_64 = 2**64 - 1
SMALLEST_UNIFORM = 2.0**-33
"""Half of the finest step of a uniform made of 32 bits; stands for 0, whose logarithm is not finite."""


class Stream(IntEnum):
    """Independent noises at one position. A number, once given, is never reused: answers depend on it."""

    TARGET = 0
    """Gumbel noise of the token itself; the coupled drafter shares it."""
    DRAFT = 1
    """Gumbel noise of a draft under the ratio rule."""
    COIN = 2
    """The ratio rule's acceptance coin."""
    RESIDUAL = 3
    """Gumbel noise of the ratio rule's replacement for a rejected draft."""
    XTC = 4
    """Whether XTC acts at this position."""


STREAM_BITS = 3


def key(seed: int, position: int, stream: Stream) -> tuple[int, int]:
    """The key of one noise: the high and low 32 bits of a word, as mx.random takes them.

    Two rounds of splitmix64's finalizer, the second over the position and stream packed into one word. The
    finalizer is a bijection of 64-bit words, so under one seed no two (position < 2^61, stream) share a key;
    the first round keeps seed + 1 from being this seed shifted by a position.
    """
    word = (position << STREAM_BITS) | stream
    mixed = _splitmix64(_splitmix64(seed) ^ word)
    return mixed >> 32, mixed & 0xFFFFFFFF


def gumbel(seed: int, positions: Sequence[int], vocab: int, stream: Stream) -> mx.array:
    """Standard Gumbel noise for each token at each position: fp32 `[len(positions), vocab]`, lazy.

    `-log(-log1p(-u))`, not `-log(-log(u))`: large values come from u near 0, where fp32 is fine, instead of u near 1,
    where it has steps of 2^-24 and would cut the noise off at 16.6. With 248,320 tokens 1.5 % of
    positions draw beyond that. Row i is bit for bit what its position gives alone.
    """
    u = _uniforms(seed, positions, stream, shape=(vocab,))
    return -mx.log(-mx.log1p(-mx.maximum(u, SMALLEST_UNIFORM)))


def uniform(seed: int, positions: Sequence[int], stream: Stream) -> mx.array:
    """One number in [0, 1) for each position: fp32 `[len(positions)]`, lazy."""
    return _uniforms(seed, positions, stream, shape=())


def _uniforms(
    seed: int, positions: Sequence[int], stream: Stream, shape: tuple[int, ...]
) -> mx.array:
    keys = mx.array([key(seed, p, stream) for p in positions], dtype=mx.uint32)
    draws: mx.array = mx.vmap(lambda k: mx.random.uniform(shape=shape, key=k))(keys)
    return draws


def _splitmix64(x: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): one output."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
