"""Counter-based noise: every random number is a function of (seed, position, stream) only.

No generator has a state. So a token is drawn with the same noise in a window of five, alone, on another machine after a
failure, or again after a rollback (DESIGN §6).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import mlx.core as mx

MASK_64 = 2**64 - 1
SMALLEST_UNIFORM = 2.0**-33
"""Half of the finest step of a uniform number of 32 bits. It replaces 0, whose logarithm is not finite."""


class Stream(IntEnum):
    """The independent noises at one position. The numbers never change, since answers depend on them."""

    TARGET = 0
    """Gumbel noise of the token itself; the coupled drafter shares it."""
    DRAFT = 1
    """Gumbel noise of a draft under the ratio rule."""
    COIN = 2
    """The ratio rule's acceptance coin."""
    RESIDUAL = 3
    """Gumbel noise of the ratio rule's replacement for a rejected draft."""
    XTC = 4
    """The draw that decides if XTC acts at this position."""


STREAM_BITS = 3


def key(seed: int, position: int, stream: Stream) -> tuple[int, int]:
    """Return the key of one noise: the high and low 32 bits of a word, as mx.random takes them.

    The key is the result of two rounds of splitmix64's finalizer. The second round includes position and stream, packed
    into one word. The finalizer is a bijection of 64-bit words. So under one seed two pairs (position < 2^61, stream)
    never share a key. Because of the first round, seed + 1 does not give the noise of this seed shifted by a position.
    """
    word = (position << STREAM_BITS) | stream
    mixed = _splitmix64(_splitmix64(seed) ^ word)
    return mixed >> 32, mixed & 0xFFFFFFFF


def gumbel(seed: int, positions: Sequence[int], vocab: int, stream: Stream) -> mx.array:
    """Return standard Gumbel noise for each token at each position: fp32 `[len(positions), vocab]`, lazy.

    The formula is `-log(-log1p(-u))`, not `-log(-log(u))`. Its large values come from u near 0, where fp32 is precise.
    Near 1, fp32 has steps of 2^-24, which would limit the noise to 16.6. With 248,320 tokens, 1.5 % of the positions
    draw a larger value. Row i has the same bits as its position alone.
    """
    return gumbel_of(key_array([(seed, position) for position in positions], stream), vocab)


def key_array(places: Sequence[tuple[int, int]], stream: Stream) -> mx.array:
    """Return the key of each (seed, position) of `places`: uint32 `[len(places), 2]`."""
    return mx.array([key(*place, stream) for place in places], dtype=mx.uint32)


def gumbel_of(keys: mx.array, vocab: int) -> mx.array:
    """Return the noise of `gumbel` for each of `keys`, which may be lazy: fp32 `[len(keys), vocab]`, lazy."""
    u = _uniforms(keys, shape=(vocab,))
    return -mx.log(-mx.log1p(-mx.maximum(u, SMALLEST_UNIFORM)))


def uniform(seed: int, positions: Sequence[int], stream: Stream) -> mx.array:
    """Return one number in [0, 1) for each position: fp32 `[len(positions)]`, lazy."""
    return _uniforms(key_array([(seed, position) for position in positions], stream), shape=())


def _uniforms(keys: mx.array, shape: tuple[int, ...]) -> mx.array:
    draws: mx.array = mx.vmap(lambda k: mx.random.uniform(shape=shape, key=k))(keys)
    return draws


def _splitmix64(x: int) -> int:
    """Return one output of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
