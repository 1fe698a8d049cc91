"""The number of windows of a sequence that may be open at once. Pure functions."""

from __future__ import annotations

from coordinator.planning.capacity import Capacity
from mtp.depth.controller import MAX_DEPTH


def open_windows(capacity: Capacity, decoding: int) -> int:
    """Return how many open windows of each of `decoding` sequences fit into the plan's memory.

    The plan reserves one open window for each sequence that it admits.
    """
    return 2 * capacity.sequences // decoding - 1


def windows_per_sequence(capacity: Capacity, stages: int, decoding: int) -> int:
    """Return how many windows each of `decoding` sequences may have in flight so that no stage is idle."""
    if stages < 2 * decoding:
        return 1
    return max(1, min(stages // decoding, open_windows(capacity, decoding), MAX_DEPTH + 1))
