"""The number of windows of a sequence that may be open at once. Pure functions."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.generation.sequence import Sequence
from coordinator.planning.capacity import Capacity
from mtp.depth.controller import MAX_DEPTH

KV_STEP = 256
"""Tokens. K/V caches grow in steps of this size, so a copy of a cache is as long as the next multiple."""


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


def may_run_ahead(capacity: Capacity, stages: int, running: Collection[Sequence]) -> bool:
    """Return whether the plan's memory allows a second open window of each of the `running` sequences.

    The header of a window commits the window two places before it. So a stage that computes the second open window
    holds three states of a sequence, which the plan reserves (`STATES_PER_SEQUENCE`): before either window, and the one
    that it computes. A single stage begins the second window before the first is finished, and MLX then copies the K/V.
    This takes K/V that no sequence has reserved, unless the plan has memory for more open windows.
    """
    if stages > 1 or open_windows(capacity, len(running)) > 1:
        return True
    copied = sum(len(sequence.tokens) + KV_STEP for sequence in running)
    return copied <= capacity.kv_tokens - sum(sequence.capacity for sequence in running)
