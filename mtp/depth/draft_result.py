"""The result of one draft, as the controller and the counters use it."""

from __future__ import annotations

from typing import NamedTuple


class DraftResult(NamedTuple):
    """A draft at `position` in its chain, counted from 1, was `accepted` or rejected."""

    position: int
    accepted: bool
