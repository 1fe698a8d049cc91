"""The longest prefix that the disks of all stages have, and the blocks to move for a longer one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from proto import cluster_pb2 as pb
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


def longest_prefix(disks: Sequence[pb.PrefixReply]) -> FoundPrefix:
    """Return the longest prefixes with and without moves between `disks`, the answers of all workers."""
    most = FoundPrefix()
    for length in sorted({one.length for disk in disks for one in disk.held}, reverse=True):
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


def _moves(disks: Sequence[pb.PrefixReply], length: int) -> list[Move] | None:
    """Return the moves after which each stage has `length` tokens, or None if some layer is on no disk."""
    held = [{n for one in disk.held if one.length == length for n in one.layers} for disk in disks]
    moves: list[Move] = []
    for target, disk in enumerate(disks):
        missing = set(disk.layers) - held[target]
        for source, other in enumerate(disks):
            # Disks of another namespace have other bits.
            found = missing & held[source] if other.namespace == disk.namespace else set[int]()
            moves += (Move(source, target, span) for span in _spans(found))
            missing -= found
        if missing:
            return None
    return moves


def _spans(layers: Iterable[int]) -> Iterator[Span]:
    """Yield the spans that `layers` form together."""
    for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        yield Span(numbers[0], numbers[-1] + 1)
