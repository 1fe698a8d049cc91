"""The backup of a sequence: the state of its layers as bytes, in the pieces that travel between the processes.

Prefixes are named by a hash of their tokens, equal in the coordinator and on every stage.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from proto import cluster_pb2 as pb
from proto.errors import ProtocolError

PIECE_BYTES = 2**20
"""Bytes. Maximum size of a piece. A heartbeat waits for at most one, which takes 8 ms at 1 Gbit/s."""

MAX_LAYER_BYTES = 2**31
"""Bytes. Maximum size of the state of one layer. K/V of 262,144 tokens takes 1 GB in Qwen3.5-27B."""


@dataclass(frozen=True)
class LayerState:
    """The state of layer number `layer`, or of the MTP head for the number after the last layer.

    With `appends` the bytes continue the earlier states of the layer, as for K/V. Otherwise they replace them.
    """

    layer: int
    appends: bool
    data: bytes | bytearray
    rank: int = 0
    """The member whose share of the layer this is, in a group of `size`."""
    size: int = 1


@dataclass(frozen=True)
class ReceivedStates:
    """The state of layers after `tokens` tokens, whose transfer took `seconds` without the wait for an engine."""

    tokens: int
    states: list[LayerState]
    seconds: float


def split(states: Iterable[LayerState], *, checked: bool = False) -> Iterator[pb.BackupPiece]:
    """Yield the pieces of `states`, with checksums where they are `checked`."""
    for state in states:
        layer, appends, rank, size = state.layer, state.appends, state.rank, state.size
        for start in range(0, max(1, len(state.data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            data, ends = bytes(state.data[start:end]), end >= len(state.data)
            crc32 = zlib.crc32(data) if checked else None
            yield pb.BackupPiece(layer=layer, appends=appends, data=data, ends=ends, rank=rank, size=size, crc32=crc32)


class BackupTooLargeError(ProtocolError):
    """The states of one sequence exceed the limit."""


@dataclass
class PieceJoiner:
    """The inverse of `split`, for pieces that arrive one by one. `limit` bounds the bytes of all states."""

    limit: int
    states: list[LayerState] = field(default_factory=list)
    _open: bytearray = field(default_factory=bytearray)
    _received: int = 0

    def add_piece(self, piece: pb.BackupPiece) -> None:
        """Add the next piece. Raises BackupTooLargeError beyond a limit, and ProtocolError for another checksum."""
        if piece.HasField("crc32") and piece.crc32 != zlib.crc32(piece.data):
            raise ProtocolError(f"the checksum of a state of layer {piece.layer} is invalid")
        self._received += len(piece.data)
        if len(self._open) + len(piece.data) > MAX_LAYER_BYTES or self._received > self.limit:
            raise BackupTooLargeError(f"a backup of {self._received} bytes exceeds the limit")
        self._open += piece.data
        if piece.ends:
            data, size = bytes(self._open), max(1, piece.size)
            self.states.append(LayerState(piece.layer, piece.appends, data, piece.rank, size))
            self._open = bytearray()


def by_layer(states: Iterable[LayerState]) -> dict[int, list[tuple[bytes | bytearray, ...]]]:
    """Return the states of each layer, the oldest first: each the shares of all members that made it together.

    Raises ProtocolError if the share of a member is missing.
    """
    found: dict[int, list[list[LayerState]]] = {}
    for state in states:
        made = found.setdefault(state.layer, [])
        if not state.rank:
            made.append([])
        if not made or len(made[-1]) != state.rank:
            raise ProtocolError(f"a backup of layer {state.layer} has its shares in another order")
        made[-1].append(state)
    if any(len(one) != one[0].size for made in found.values() for one in made):
        raise ProtocolError("a backup lacks the share of a member")
    return {n: [tuple(s.data for s in one) for one in made] for n, made in found.items()}


STEM_TOKENS = 128
"""Tokens. All prefixes of a prompt are found by its first 0, 128, 256 … tokens, whatever else an index has."""

STEM_BYTES, LENGTH_BYTES, DIGEST_BYTES = 8, 4, 16
"""The parts of a key: the hash of its last whole STEM_TOKENS, its length, and the hash of all tokens.

Two prefixes share the last one by chance once in 2**64 entries.
"""

KEY_BYTES = STEM_BYTES + LENGTH_BYTES + DIGEST_BYTES


def prefix_key(tokens: Sequence[int]) -> bytes:
    """Return the key of `tokens`."""
    return next(prefix_keys(tokens, [len(tokens)]))


def prefix_keys(tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[bytes]:
    """Yield the key of the first `n` tokens for each `n` in `lengths`, which ascend. Reads `tokens` once."""
    words = array("I", tokens)
    data, digest, done = memoryview(words).cast("B"), hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    stem, stem_end = b"", -1

    def digest_of(length: int) -> bytes:
        nonlocal done
        digest.update(data[done * words.itemsize : length * words.itemsize])
        done = length
        return digest.digest()

    for length in lengths:
        if (end := length // STEM_TOKENS * STEM_TOKENS) != stem_end:
            stem, stem_end = digest_of(end)[:STEM_BYTES], end
        yield stem + length.to_bytes(LENGTH_BYTES, "big") + digest_of(length)


def stems_of(tokens: Sequence[int]) -> list[bytes]:
    """Return the first bytes of the keys that a proper prefix of `tokens` may have."""
    return [key[:STEM_BYTES] for key in prefix_keys(tokens, range(0, len(tokens), STEM_TOKENS))]


def length_of(key: bytes) -> int:
    """Return the tokens of the prefix `key`."""
    return int.from_bytes(key[STEM_BYTES : STEM_BYTES + LENGTH_BYTES], "big")
