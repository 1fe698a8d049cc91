"""The pieces of states, and the keys of prefixes."""

from __future__ import annotations

import random

import pytest

from proto.backup import (
    KEY_BYTES,
    STEM_BYTES,
    STEM_TOKENS,
    LayerState,
    PieceJoiner,
    length_of,
    prefix_key,
    prefix_keys,
    split,
    stems_of,
)
from proto.errors import ProtocolError

TOKENS = [random.Random(1).randrange(2**31) for _ in range(1000)]


def test_other_bytes_of_a_checked_state_are_refused() -> None:
    """A state from a disk has a checksum for each piece. One of a running sequence has none."""
    (piece,) = split([LayerState(3, True, b"state")], checked=True)
    joiner = PieceJoiner(100)
    joiner.add_piece(piece)
    assert joiner.states == [LayerState(3, True, b"state")]
    piece.data = b"stats"
    with pytest.raises(ProtocolError, match="the checksum of a state of layer 3 is invalid"):
        joiner.add_piece(piece)
    (plain,) = split([LayerState(3, True, b"state")])
    assert not plain.HasField("crc32")


def test_a_key_tells_its_length_and_what_it_continues() -> None:
    """Keys are equal in one pass and one by one, and all of a prompt begin with one of its stems."""
    lengths = [0, 1, STEM_TOKENS - 1, STEM_TOKENS, STEM_TOKENS + 1, 300, 301, 999, 1000]
    keys = [*prefix_keys(TOKENS, lengths)]
    assert keys == [prefix_key(TOKENS[:n]) for n in lengths]
    assert [length_of(key) for key in keys] == lengths
    assert len({*keys}) == len(keys) and {len(key) for key in keys} == {KEY_BYTES}
    assert {key[:STEM_BYTES] for key in keys} <= {*stems_of([*TOKENS, 1])}
    other = [*TOKENS[:200], 1, *TOKENS[201:]]
    assert prefix_key(other[:300])[:STEM_BYTES] not in stems_of(TOKENS)
