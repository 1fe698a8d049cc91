"""How a sequence is drafted for: how wide its windows are, and how many of them are in flight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Windows of `width` tokens, up to `fill` of them in flight, each built on the hope that those before it are kept
    whole. One in flight is a block verify: it takes all the drafts there are."""

    width: int = 1
    fill: int = 1

    @property
    def depth(self) -> int:
        """Drafts a window has to bring: those of the newest window in flight when this one has come back whole."""
        return self.width * self.fill - 1
