"""The names of prefixes: a hash of their tokens, equal in the coordinator and on every stage."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

KEY_BYTES = 16
"""Bytes of a key. Two prefixes share one by chance once in 2**64 entries."""


def prefix_key(tokens: Sequence[int]) -> bytes:
    """Return the key of `tokens`."""
    return next(prefix_keys(tokens, [len(tokens)]))


def prefix_keys(tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[bytes]:
    """Yield the key of the first `n` tokens for each `n` in `lengths`, which ascend. Reads `tokens` once."""
    words = array("I", tokens)
    data, digest, done = memoryview(words).cast("B"), hashlib.blake2b(digest_size=KEY_BYTES), 0
    for length in lengths:
        digest.update(data[done * words.itemsize : length * words.itemsize])
        done = length
        yield digest.digest()
