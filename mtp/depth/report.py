"""The depth controller's knowledge as plain data, for status pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShapeReport:
    """One shape that the controller compares.

    `cost` is the time of a step relative to plain decoding; it is a lower bound unless `measured`. `tokens` is the
    expected number of tokens of a step or, in a filled pipeline, of a pass. `speed` is the expected speed relative to
    plain decoding.
    """

    width: int
    fill: int
    cost: float
    tokens: float
    speed: float
    measured: bool
    chosen: bool


@dataclass(frozen=True)
class SearchReport:
    """The comparison for up to `sequences` sequences that step together, each with up to `fill` windows in flight."""

    sequences: int
    fill: int
    shapes: tuple[ShapeReport, ...]
    """Plain decoding first, then blocks by depth, then filled pipelines."""
    plain_seconds: float | None = None
    """Measured time of a step of plain decoding under the present load; None before a measurement."""
