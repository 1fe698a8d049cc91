"""The estimate of how often drafts are accepted, and the tokens that follow from it. Plain numbers in and out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mtp.depth.draft_result import DraftResult

MEMORY_WINDOWS = 48
"""Windows. Time constant of the acceptance estimate.

Its noise is about 1/sqrt(96), and it follows a change within about 50 windows.
"""

FADED_WINDOWS = 4
"""Windows. Weight of an old acceptance estimate when a probe starts: as much as one probe."""

FIRST_ACCEPTANCE = 0.75
"""Acceptance of a first draft before any was seen: a little below published runs of Qwen3.5 heads."""

NEXT_ACCEPTANCE = 1.0
"""Acceptance of a position never seen, relative to the position before it."""

PRIOR_WINDOWS = 2.5
"""Windows. Weight of FIRST_ACCEPTANCE and NEXT_ACCEPTANCE in the estimate."""


class AcceptanceEstimate:
    """The chance that draft i+1 of a window is accepted if draft i was. Old counts decay exponentially."""

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._drafted: list[float] = []

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Record the results of drafts that followed each other. Results after the first rejected draft are ignored."""
        decay = 1 - 1 / MEMORY_WINDOWS
        for position, accepted in results:
            missing = position - len(self._drafted)
            self._accepted.extend([0.0] * missing)
            self._drafted.extend([0.0] * missing)
            self._accepted[position - 1] = self._accepted[position - 1] * decay + accepted
            self._drafted[position - 1] = self._drafted[position - 1] * decay + 1
            if not accepted:
                return

    def by_position(self, depth: int, optimism: float = 0.0) -> list[float]:
        """Return the estimate for each of the first `depth` drafts, given that the drafts before it were accepted.

        `optimism` is a number of standard errors to add. The fewer drafts were seen, the more it adds. A position never
        seen is then assumed to be as good as the one before it.
        """
        chances: list[float] = []
        for position in range(depth):
            seen = position < len(self._drafted) and self._drafted[position] > 0
            if chances and optimism and not seen:
                chances.append(chances[-1])
                continue
            prior = NEXT_ACCEPTANCE * chances[-1] if chances else FIRST_ACCEPTANCE
            accepted, drafted = 0.0, 0.0
            if seen:
                accepted, drafted = self._accepted[position], self._drafted[position]
            windows = drafted + PRIOR_WINDOWS
            chance = (accepted + PRIOR_WINDOWS * prior) / windows
            error = math.sqrt(chance * (1 - chance) / windows)
            chances.append(min(1.0, chance + optimism * error))
        return chances

    def fade(self, first: int) -> None:
        """Reduce the weight of old counts at index `first` (0 is the first draft) and after it."""
        for position in range(first, len(self._drafted)):
            share = min(1.0, FADED_WINDOWS / max(self._drafted[position], 1.0))
            self._accepted[position] *= share
            self._drafted[position] *= share


def expected_accepted_length(chances: Sequence[float]) -> float:
    """Return the mean tokens of a window whose drafts are accepted with `chances`, given those before them."""
    total = reach = 1.0
    for chance in chances:
        reach *= chance
        total += reach
    return total


MAX_CHANCE = 0.98
"""Upper bound of an acceptance in `expected_run`: it bounds the mean run at fifty tokens."""


@dataclass(frozen=True)
class Run:
    """The mean yield of a filled pipeline between two misspeculations: tokens, and windows that return."""

    tokens: float
    windows: float


def expected_run(chances: Sequence[float], width: int) -> Run:
    """Return the mean run whose drafts are accepted with `chances`, given those before them.

    The windows after the first ones take their drafts from the end of the chain, so its last `width` positions repeat.

    tokens = 1 + a_1 + a_1 a_2 + …      windows of w = 1 + a_1…a_w + a_1…a_2w + …
    """
    bounded = [min(chance, MAX_CHANCE) for chance in chances]
    tokens = windows = reach = 1.0
    for number, chance in enumerate(bounded, start=1):
        reach *= chance
        tokens += reach
        windows += reach if number % width == 0 else 0.0
    newest = bounded[-width:]
    onward = math.prod(newest) ** (1 / len(newest))
    tokens += reach * onward / (1 - onward)
    behind = len(bounded) % width
    following = reach * onward ** (width - behind)
    windows += following / (1 - onward**width)
    return Run(tokens, windows)
