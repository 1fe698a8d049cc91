"""A controller that drafts from every match at any cost: machines whose rows are dear would never do so."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.drafts.averages import Shape
from coordinator.drafts.controller import Controller, MtpMode, shapes_of_matches
from coordinator.drafts.prompt_lookup import NgramMatcher, NgramMode


class EagerMatches(Controller):
    """A controller whose matched windows take each shape in turn."""

    def __init__(self, mode: MtpMode) -> None:
        super().__init__(mode, ngram=NgramMode.auto)
        self._turn = 0

    def matched_shapes(self, matchers: Sequence[NgramMatcher | None], fill: int = 1) -> list[Shape | None]:
        """Return the next shape for each sequence with a match."""
        shapes = shapes_of_matches(max(1, len(matchers)), fill)
        found: list[Shape | None] = []
        for matcher in matchers:
            matched = matcher is not None and matcher.match is not None
            self._turn += matched
            found.append(shapes[self._turn % len(shapes)] if matched else None)
        return found
