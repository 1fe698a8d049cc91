"""The controller of draft depth, window width and fill. It chooses from measured costs and acceptance."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from coordinator.drafts.prompt_lookup import (
    LONGEST_MATCH,
    MOST_DRAFTS,
    MatchResults,
    NgramMatcher,
    NgramMode,
)
from coordinator.drafts.search import AcceptanceEstimate, DraftResult, Search, SearchReport
from coordinator.drafts.step_costs import Shape, StepCost
from proto.errors import UsageError

MAX_DEPTH = 8
"""Drafts. Maximum depth of `--mtp`. At an acceptance of .7 a draft, a ninth draft is accepted in 4 of 100 windows."""

AUTO_DEPTH = 7
"""Drafts. Maximum depth that `auto` considers. GPU kernels for 4-bit weights compute eight rows at once."""

FILLED_DEPTH = 15
"""Drafts. Maximum depth of a filled pipeline. Tapes of 16 tokens take 30 MB for Qwen3.5-27B, less than a snapshot."""


@dataclass(frozen=True)
class MtpMode:
    """The value of `--mtp`: a fixed `depth` (0 for `off`), `filled`, or neither for `auto`."""

    depth: int | None = None
    filled: bool = False

    @classmethod
    def parse(cls, text: str) -> MtpMode:
        """Parse the value of `--mtp`. Raises UsageError for another word, or a depth above MAX_DEPTH."""
        word = text.strip().lower()
        if word == "filled":
            return cls(filled=True)
        if word in ("auto", "off"):
            return cls(None if word == "auto" else 0)
        if word.isascii() and word.isdigit() and int(word) <= MAX_DEPTH:
            return cls(int(word))
        raise UsageError(
            f"--mtp {text!r}: write auto, off, filled, or a number of drafts, 1 to {MAX_DEPTH}"
        )

    def __str__(self) -> str:
        if self.depth is None:
            return "filled" if self.filled else "auto"
        return str(self.depth) if self.depth else "off"


FILLED_WIDTHS = (1, 2, 3, 4, 6, 8)
"""Tokens. Widths of windows in a filled pipeline. Widths between them differ too little to measure them."""

LENGTH_STEP = 4096
"""Tokens. Costs are separate for shorter texts, and for those up to twice this length, four times, and so on."""

MATCHED_WIDTHS = (2, 3, 4, 6, 8, 12, 16)
"""Tokens. Widths of windows whose drafts come from the text."""

LENGTH_CLASSES = (8, 16, LONGEST_MATCH)
"""Tokens. Bounds of the classes of matches: a long match is a copy more often than a short one."""

MATCHED_ROWS = 64
"""Rows of a step if each of its sequences has a match. Many sequences have two rows each."""


class Controller:
    """The choice of each step's shape, for any number of sequences that step together.

    One controller serves a whole process. All sequences share one acceptance estimate, because acceptance depends on
    the text. Costs are separate for 1, 2, 3-4, 5-8, … sequences a step, and by the length of their texts, because
    attention to a long text costs time. A new length begins with the costs of the nearest one. With `ngram` windows may
    take their drafts from the text, in every mode, where measured costs and the acceptance of matches say that it pays.
    """

    def __init__(
        self, mode: MtpMode, max_depth: int = AUTO_DEPTH, ngram: NgramMode = NgramMode.off
    ) -> None:
        self.mode = mode
        self.ngram = ngram
        self.fused_width: int | None = None
        """Width of the widest windows with fused attention. Wider ones are expected to cost more, until measured."""
        self.max_depth = max_depth
        self.acceptance = AcceptanceEstimate()
        self._match_acceptance = [AcceptanceEstimate() for _ in range(len(LENGTH_CLASSES) + 1)]
        """Acceptance of matches by class of length. Every match counts, so it needs no probe."""
        self._searches: dict[tuple[int, int], dict[int, Search]] = {}
        """By the class of the number of sequences and the fill, and then by the class of the length."""
        self._newest: dict[tuple[int, int], Search] = {}  # the search of the length in use

    def choose_shape(self, sequences: int = 1, fill: int = 1, tokens: int = 0) -> Shape:
        """Return the next shape for `sequences`, each with up to `fill` windows and about `tokens` tokens."""
        if self.mode.depth is not None:
            return Shape(self.mode.depth + 1)
        if self.mode.filled and fill == 1:
            return Shape(1)
        return self._search(sequences, fill, tokens).choose_shape()

    def new_matcher(self) -> NgramMatcher | None:
        """Return a matcher for a new text, or None if the text is not searched."""
        return None if self.ngram is NgramMode.off else NgramMatcher()

    def matched_shape(
        self, matcher: NgramMatcher, sequences: int = 1, fill: int = 1, tokens: int = 0
    ) -> Shape | None:
        """Return the shape of a sequence's next window with the drafts of its match, or None if they do not pay."""
        if matcher.match is None:
            return None
        estimate = self._match_estimate(matcher.match.length)
        shapes = matched_shapes(sequences, fill)
        return self._search(sequences, fill, tokens).matched_shape(estimate, shapes, sequences)

    def record_match(self, found: MatchResults) -> None:
        """Record the results of the drafts of a match."""
        self._match_estimate(found.length).record_drafts(found.results)

    def _match_estimate(self, length: int) -> AcceptanceEstimate:
        return self._match_acceptance[bisect_right(LENGTH_CLASSES, length)]

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Record the results of a window's drafts. Do not call it for invalidated windows, nor for those of a match."""
        self.acceptance.record_drafts(results)

    def record_step_cost(
        self,
        sequences: int,
        width: int,
        drafted: int,
        cost: StepCost,
        fill: int = 1,
        matched: Shape | None = None,
        tokens: int = 0,
    ) -> None:
        """Record the cost of a step that verified windows of `width` tokens and drafted `drafted` tokens for each.

        Do not call it for steps with prompt tokens or with windows of different widths. A step between two shapes,
        which verified for one and drafted for the other, is ignored. `matched` is the shape of those of its windows
        whose drafts come from the text. The others may then have any width.
        """
        searched = self.mode.depth is None and (fill > 1 or not self.mode.filled)
        if searched or self.ngram is NgramMode.auto:
            self._search(sequences, fill, tokens).record_step_cost(width, drafted, cost, matched)

    def forget_costs(self) -> None:
        """Forget all costs, because other machines or other cuts serve from now on. Keep the acceptance."""
        self._searches.clear()
        self._newest.clear()

    def report(self) -> tuple[SearchReport, ...]:
        """Return the shapes that the controller compares, for status pages. It is empty unless in `auto`."""
        if self.mode.filled or self.mode.depth is not None:
            return ()
        found = []
        for (bits, fill), search in sorted(self._newest.items()):
            seconds = search.costs.step_seconds(Shape(1))
            speed = 1 / seconds if seconds else None
            found.append(SearchReport(2**bits, fill, search.report(), speed))
        return tuple(found)

    def _search(self, sequences: int, fill: int, tokens: int) -> Search:
        key = ((sequences - 1).bit_length(), fill)
        by_length = self._searches.setdefault(key, {})
        length = (tokens // LENGTH_STEP).bit_length()
        if length not in by_length:
            nearest = min(by_length, key=lambda known: abs(known - length), default=None)
            shapes = shapes_to_compare(fill, None if self.mode.filled else self.max_depth)
            if self.mode.depth is not None:
                shapes = [Shape(self.mode.depth + 1)]
            search = Search(self.acceptance, shapes, self.fused_width)
            if nearest is not None:
                search.start_from(by_length[nearest])
            by_length[length] = search
        self._newest[key] = by_length[length]
        return by_length[length]


def shapes_to_compare(fill: int, max_depth: int | None) -> list[Shape]:
    """Return plain decoding, blocks up to `max_depth` (None: none), and filled pipelines of up to `fill` windows."""
    blocks = [] if max_depth is None else [Shape(depth + 1) for depth in range(max_depth + 1)]
    filled = [Shape(w, f) for f in range(fill, 1, -1) for w in FILLED_WIDTHS]
    return blocks + [shape for shape in filled if shape.depth <= FILLED_DEPTH] or [Shape(1)]


@lru_cache(maxsize=64)
def matched_shapes(sequences: int, fill: int) -> tuple[Shape, ...]:
    """Return the shapes of windows with the drafts of a match: blocks, and filled pipelines of up to `fill` windows."""
    widest = max(MATCHED_WIDTHS[0], min(MOST_DRAFTS + 1, MATCHED_ROWS // sequences))
    blocks = [Shape(width, matched=True) for width in MATCHED_WIDTHS if width <= widest]
    filled = [Shape(w, f, matched=True) for f in range(fill, 1, -1) for w in FILLED_WIDTHS]
    return (*blocks, *(shape for shape in filled if shape.ahead <= MOST_DRAFTS))
