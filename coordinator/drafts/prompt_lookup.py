"""Drafts from the text itself: the tokens that followed an earlier place with the same newest tokens.

An answer that edits a file repeats most of it. There a match of some tokens foretells many more, and costs no pass of
the head. `NgramMatcher` is prompt lookup decoding (Saxena 2023) with the longest match of the newest places, which is
kept while its drafts are right. As in LZ77, each n-gram knows its newest place, and each place the one before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from coordinator.drafts.averages import DraftResult
from proto.images import FIRST_IMAGE_TOKEN

GRAM = 4
"""Tokens. Shortest match: in code, three tokens repeat everywhere."""

LONGEST_MATCH = 32
"""Tokens. Longer matches are not told apart."""

MOST_PLACES = 8
"""Earlier places to compare, the newest first."""

MOST_NEW = 2048
"""Tokens that one call adds to the index, which take a millisecond. A known prompt takes several calls."""

MOST_DRAFTS = 15
"""Drafts of a match: with the confirmed token they are 16 rows, as many as a filled pipeline has in flight."""


class NgramMode(StrEnum):
    """The value of `--ngram`."""

    auto = "auto"
    off = "off"


@dataclass(frozen=True)
class Match:
    """An earlier place whose last `length` tokens equal the newest ones. The token after it is at `follower`."""

    length: int
    follower: int


@dataclass(frozen=True)
class MatchResults:
    """The results of the drafts of a match of `length` tokens, whether or not a window carried them."""

    length: int
    results: tuple[DraftResult, ...]


class NgramMatcher:
    """The matches of one text, which only grows. `drafts` are the tokens that the present match foretells."""

    def __init__(self) -> None:
        self.match: Match | None = None
        self.drafts: tuple[int, ...] = ()
        self._seen = 0  # tokens of the text at the last call
        self._indexed = GRAM  # the first place that is not in the index
        self._newest: dict[int, int] = {}
        self._before = array("i", [-1] * GRAM)
        """The place before each place with the same n-gram, or -1. A place is the index of a token after an n-gram."""

    def follow(self, text: Sequence[int]) -> MatchResults | None:
        """Find the match at the end of `text`, and return the results of the drafts of the match before."""
        added = tuple(text[self._seen :])
        found = self._results(added)
        going_on = self.match is not None and self.drafts[: len(added)] == added
        self._add_places(text)
        if self.match is not None and going_on:
            length = min(LONGEST_MATCH, self.match.length + len(added))
            self.match = Match(length, self.match.follower + len(added))
        else:
            self.match = self._find_match(text)
        self._seen = len(text)
        self.drafts = () if self.match is None else _copied(text, self.match.follower)
        if max(self.drafts, default=0) >= FIRST_IMAGE_TOKEN:
            self.match, self.drafts = None, ()  # the model never says the tokens of an image
        return found

    def _results(self, added: Sequence[int]) -> MatchResults | None:
        if self.match is None or not added:
            return None
        results = []
        for position, (draft, token) in enumerate(zip(self.drafts, added, strict=False), start=1):
            results.append(DraftResult(position, draft == token))
            if draft != token:
                break
        return MatchResults(self.match.length, tuple(results))

    def _add_places(self, text: Sequence[int]) -> None:
        """Add the places of `text`, but the one at its end: no token follows there yet."""
        end = min(len(text), self._indexed + MOST_NEW)
        for place in range(self._indexed, end):
            gram = hash(tuple(text[place - GRAM : place]))
            self._before.append(self._newest.get(gram, -1))
            self._newest[gram] = place
        self._indexed = max(self._indexed, end)

    def _find_match(self, text: Sequence[int]) -> Match | None:
        """Return the longest match, the newest of equally long ones, or None."""
        if len(text) < GRAM:
            return None
        place = self._newest.get(hash(tuple(text[-GRAM:])), -1)
        best: Match | None = None
        for _ in range(MOST_PLACES):
            if place < 0 or (best is not None and best.length == LONGEST_MATCH):
                break
            length = _common_tokens(text, place)
            # Other tokens may have the same hash.
            if length >= GRAM and (best is None or length > best.length):
                best = Match(length, place)
            place = self._before[place]
        return best


def _common_tokens(text: Sequence[int], place: int) -> int:
    """Return how many tokens before `place` equal those at the end of `text`, up to LONGEST_MATCH."""
    length = 0
    while length < min(LONGEST_MATCH, place) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


def _copied(text: Sequence[int], follower: int) -> tuple[int, ...]:
    """Return the MOST_DRAFTS tokens from `follower` on. Beyond the end of `text` they repeat, as in LZ77."""
    found = list(text[follower : follower + MOST_DRAFTS])
    period = len(found)
    while len(found) < MOST_DRAFTS:
        found.append(found[-period])
    return tuple(found)
