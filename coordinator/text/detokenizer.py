"""From tokens to text, piece by piece: whole characters only, and nothing that may yet be a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text that is final, the tokens whose text begins in it, and where in the whole text each begins.

    Over one stream every token of the text is in exactly one piece, in order. Offsets count characters.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    @classmethod
    def join(cls, pieces: Iterable[Piece]) -> Piece:
        """Pieces that follow one another, as one."""
        parts = list(pieces)
        return cls(
            "".join(part.text for part in parts),
            tuple(token for part in parts for token in part.tokens),
            tuple(offset for part in parts for offset in part.offsets),
        )


class TextStream:
    """Turns the tokens of one answer into pieces of text.

    Bytes that are no UTF-8 become U+FFFD; a character cut off by the end of the answer is left out.
    Text before a stop string is emitted, the stop string and all after it is not: then `stopped` is True
    and nothing more may be added. Where two stop strings overlap, the one that ends first counts, so the
    text does not depend on how it was cut into tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        assert all(stop), "an empty stop string is found everywhere"
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._emitted = 0  # characters
        self._unreported: deque[tuple[int, int]] = deque()  # token, offset of its text
        self.stopped = False

    def add(self, token: int) -> Piece:
        """Take one token; return what became final with it, possibly nothing."""
        assert not self.stopped, "no token follows a stop string"
        self._unreported.append((token, self._emitted + len(self._held)))
        self._held += self._decoder.decode(self._token_bytes(token))
        if (found := _first_stop(self._held, self._stop)) is not None:
            self.stopped = True
            piece = self._release(found)
            self._held = ""
            self._unreported.clear()
            return piece
        return self._release(len(self._held) - _hold_back(self._held, self._stop))

    def finish(self) -> Piece:
        """Return what was held back, once no token will come. Nothing after a stop string."""
        last = self._release(len(self._held))
        # What is left has no text of its own: control tokens, or the start of a character.
        rest = Piece("", *_columns(self._unreported))
        self._unreported.clear()
        return Piece.join((last, rest))

    def _release(self, length: int) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._emitted += length
        begun = []
        while self._unreported and self._unreported[0][1] < self._emitted:
            begun.append(self._unreported.popleft())
        return Piece(text, *_columns(begun))


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(token for token, _ in pairs), tuple(offset for _, offset in pairs)


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins; the longer of two that end together."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _hold_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return length
    return 0
