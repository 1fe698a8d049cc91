"""How long faults made clients wait, and with what that time was spent.

The parts of a pause are read from the coordinator's log alone, the pause from what clients saw: so a pause may well be
longer than its parts, and it is said how often one is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.chaos.load import Answer

LOADING, SERVING, REBUILT = "cluster: loading", "cluster: serving", "sequences rebuilt"
NOTICED = ("worker lost", "pipeline failed", "cluster: waiting for workers", LOADING)
PARTS = ("detection", "plan", "load", "prefill")

REPLAN = "replan"
"""The kind of a change of plan that was asked for, to have a worker used again."""

DELIVERY_SECONDS = 0.25
"""From the loop to a client over HTTP, where clients, workers and the coordinator share two cores."""


@dataclass(frozen=True)
class Injected:
    """One fault: what it was, and from when to when it was looked at (seconds since 1970)."""

    kind: str
    at: float
    until: float


@dataclass(frozen=True)
class Episode:
    """A fault that ended a plan, in seconds: until it was noticed, until workers were told to load another plan, until
    that one served (tries that failed included), and until the last sequence that lived through it had its next token.

    `pause` is the longest silence of a client that it touched, from the fault on.
    """

    kind: str
    detection: float
    plan: float
    load: float
    prefill: float
    pause: float

    @property
    def bound(self) -> float:
        return self.detection + self.plan + self.load + self.prefill

    @property
    def over(self) -> bool:
        """Whether a client waited longer than can be told from the coordinator's log."""
        return self.pause > self.bound + DELIVERY_SECONDS


def episodes(
    faults: Sequence[Injected], records: Sequence[dict[str, Any]], answers: Sequence[Answer]
) -> list[Episode]:
    """Those of the faults that ended a plan."""
    log = [(datetime.fromisoformat(r["time"]).timestamp(), r["message"]) for r in records]
    gaps = [gap for a in answers for gap in zip(a.times, a.times[1:], strict=False)]
    found = (_episode(fault, log, gaps) for fault in faults)
    return [episode for episode in found if episode is not None]


def _episode(
    fault: Injected, log: list[tuple[float, str]], gaps: list[tuple[float, float]]
) -> Episode | None:
    within = [(t, message) for t, message in log if fault.at <= t < fault.until]
    noticed = next((t for t, message in within if message in NOTICED), None)
    if noticed is None:
        return None
    served = [t for t, message in within if message == SERVING and t > noticed]
    if not served:
        return None
    # Silences that lie over the change of plans: those of clients that waited for it.
    touched = [(start, end) for start, end in gaps if start <= noticed and end >= served[0]]
    rebuilt = next((t for t, message in log if message == REBUILT and t >= served[0]), None)
    if not touched or rebuilt is None:
        rebuilt = served[0]  # nobody had to be fed again
    serving = max(t for t in served if t <= rebuilt)
    loading = next((t for t, message in within if message == LOADING and t >= noticed), serving)
    return Episode(
        fault.kind,
        detection=noticed - fault.at,
        plan=loading - noticed,
        load=serving - loading,
        prefill=rebuilt - serving,
        pause=max((end - max(start, fault.at) for start, end in touched), default=0.0),
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 95 % and the largest; zeros where there are none."""
    if not values:
        return 0.0, 0.0, 0.0
    ordered = sorted(values)
    return (
        statistics.median(ordered),
        ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        ordered[-1],
    )
