"""The shape of a sequence's windows: their width, and how many of them are in flight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Windows of `width` tokens, up to `fill` of them in flight.

    With `fill` 1 a window takes all drafts (a block). With `fill` > 1 the pipeline is filled: all windows but the
    first are speculative.
    """

    width: int = 1
    fill: int = 1

    @property
    def depth(self) -> int:
        """Drafts to request with a window: enough for the newest window in flight when this one is accepted whole."""
        return self.width * self.fill - 1
