"""How long faults made clients wait, and with what that time was spent: read from the coordinator's log."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.cluster.chaos_load import Answer

NOTICED = ("worker lost", "pipeline failed", "cluster: waiting for workers")
LOADING, SERVING = "cluster: loading", "cluster: serving"
PARTS = ("detection", "plan", "load", "prefill")


@dataclass(frozen=True)
class Injected:
    """One fault: what it was, and from when to when it was looked at (seconds since 1970)."""

    kind: str
    at: float
    until: float


@dataclass(frozen=True)
class Episode:
    """A fault that ended a plan, in seconds. `pause` is the longest silence of a client that it touched."""

    kind: str
    detection: float
    plan: float
    load: float
    prefill: float
    pause: float

    @property
    def bound(self) -> float:
        return self.detection + self.plan + self.load + self.prefill


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
    serving = next((t for t, message in within if message == SERVING and t > noticed), None)
    if serving is None:
        return None
    loading = max(
        (t for t, message in within if message == LOADING and t <= serving), default=noticed
    )
    # Silences that lie over the change of plans: those of clients that waited for it.
    touched = [(start, end) for start, end in gaps if start <= noticed and end >= serving]
    ends = [end for _, end in touched]
    return Episode(
        fault.kind,
        detection=noticed - fault.at,
        plan=max(0.0, loading - noticed),
        load=serving - max(loading, noticed),
        prefill=max(ends, default=serving) - serving,
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
