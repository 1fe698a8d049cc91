"""Counters of drafts and accepted drafts, by position after the confirmed token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mtp.depth.draft_result import DraftResult


@dataclass
class DraftCounts:
    """`drafted[i]` drafts at position i + 1 have a result; `accepted[i]` of them were accepted."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def record_drafts(self, results: Iterable[DraftResult]) -> None:
        """Count drafts whose result is known."""
        for position, accepted in results:
            for counter in (self.drafted, self.accepted):
                counter.extend([0] * (position - len(counter)))
            self.drafted[position - 1] += 1
            self.accepted[position - 1] += accepted
