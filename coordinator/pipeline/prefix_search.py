"""The longest prefix that the disks of all stages have, and the blocks to move for a longer one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proto.held_prefixes import HeldPrefixes, spans_of
from proto.span import Span


@dataclass(frozen=True)
class Move:
    """The blocks of `layers` on the disk of worker number `source`, which number `target` lacks."""

    source: int
    target: int
    layers: Span


@dataclass(frozen=True)
class FoundPrefix:
    """Every stage has the first `tokens` tokens of a prompt on disk, and after all `moves` the first `most`.

    `share` is the number of layers to move over those of the longest stage.
    """

    tokens: int = 0
    most: int = 0
    moves: tuple[Move, ...] = ()
    share: float = 0.0


def longest_prefix(disks: Sequence[HeldPrefixes]) -> FoundPrefix:
    """Return the longest prefixes with and without moves between `disks`."""
    most = FoundPrefix()
    for length in sorted({length for disk in disks for length in disk.held}, reverse=True):
        moves = _moves(disks, length)
        if moves is None:
            continue
        if not moves:
            return FoundPrefix(length, most.most or length, most.moves, most.share)
        if not most.moves:
            moved = sum(len(move.layers) for move in moves)
            share = moved / max(len(disk.layers) for disk in disks)
            most = FoundPrefix(0, length, tuple(moves), share)
    return most


def _moves(disks: Sequence[HeldPrefixes], length: int) -> list[Move] | None:
    """Return the moves after which each stage has `length` tokens, or None if some layer is on no disk."""
    moves: list[Move] = []
    for target, disk in enumerate(disks):
        missing = disk.missing(length)
        for source, other in enumerate(disks):
            if missing and other.namespace == disk.namespace:
                found = missing & other.held.get(length, set())
                moves += (Move(source, target, span) for span in spans_of(found))
                missing -= found
        if missing:
            return None
    return moves
