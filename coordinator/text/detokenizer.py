"""Incremental detokenization: whole characters, and no text that may still become a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Final text, the tokens whose text begins in it, and each token's offset in the whole text.

    Every token of a stream is in exactly one piece, in order. Offsets count characters.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    @classmethod
    def join(cls, pieces: Iterable[Piece]) -> Piece:
        """Return consecutive pieces as one piece."""
        parts = list(pieces)
        return cls(
            "".join(part.text for part in parts),
            tuple(token for part in parts for token in part.tokens),
            tuple(offset for part in parts for offset in part.offsets),
        )


class TextStream:
    """The conversion of one answer's tokens into pieces of text.

    Invalid UTF-8 becomes U+FFFD. A character cut off by the end of the answer is omitted. The text before a stop
    string is emitted; the stop string and the text after it are not. `stopped` is then True, `stop_string` is the
    string found, and no token may be added. If stop strings overlap, the one that ends first counts, so the text
    does not depend on token borders.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        assert all(stop), "an empty stop string is found everywhere"
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._emitted = 0  # characters
        self._unreported: deque[tuple[int, int]] = deque()  # token, offset of its text
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """True after a stop string has ended the text."""
        return self.stop_string is not None

    def add(self, token: int) -> Piece:
        """Add one token; return the text that became final with it, which may be empty."""
        assert not self.stopped, "a token was added after a stop string"
        self._unreported.append((token, self._emitted + len(self._held)))
        self._held += self._decoder.decode(self._token_bytes(token))
        if (found := _first_stop(self._held, self._stop)) is not None:
            start, self.stop_string = found
            piece = self._release(start)
            self._held = ""
            self._unreported.clear()
            return piece
        return self._release(len(self._held) - held_back(self._held, self._stop))

    def finish(self) -> Piece:
        """Return the text held back, after the last token. It is empty after a stop string."""
        last = self._release(len(self._held))
        # The remaining tokens have no text: control tokens, or the first bytes of a character.
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


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return start and text of the stop string that ends first, the longer of two that end together, or None."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of one of `stops`, but not all of it."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and text.endswith(stop[:length]) for stop in stops):
            return length
    return 0
