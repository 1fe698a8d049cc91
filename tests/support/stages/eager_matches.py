"""A controller that drafts from every match at any cost: machines whose rows are dear would never do so."""

from __future__ import annotations

from coordinator.drafts.controller import Controller, MtpMode, matched_shapes
from coordinator.drafts.prompt_lookup import NgramMatcher, NgramMode
from coordinator.drafts.step_costs import Shape


class EagerMatches(Controller):
    """A controller whose matched windows take each shape in turn."""

    def __init__(self, mode: MtpMode) -> None:
        super().__init__(mode, ngram=NgramMode.auto)
        self._turn = 0

    def matched_shape(
        self, matcher: NgramMatcher, sequences: int = 1, fill: int = 1, tokens: int = 0
    ) -> Shape | None:
        """Return the next shape, if there is a match."""
        if matcher.match is None:
            return None
        self._turn += 1
        shapes = matched_shapes(sequences, fill)
        return shapes[self._turn % len(shapes)]
