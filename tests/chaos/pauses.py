"""The length of the pauses that faults caused, and what the coordinator did during each.

The parts of a pause come from the coordinator's log. The pause itself comes from the clients, so it may be longer than
its parts. The report counts such pauses.
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
"""Kind of a plan change that was requested so that a recovered worker is used again."""

DELIVERY_SECONDS = 0.25
"""Seconds. Delay between the loop and a client over HTTP, where clients, workers and coordinator share two cores."""


@dataclass(frozen=True)
class Injected:
    """One fault: its kind, its start and the end of its observation, in seconds since 1970."""

    kind: str
    at: float
    until: float


@dataclass(frozen=True)
class Episode:
    """A fault that ended a plan, split into phases in seconds.

    `detection` lasts until the coordinator noticed the fault, and `plan` until it told workers to load the next plan.
    `load` lasts until a plan served, failed attempts included. `prefill` lasts until the last surviving sequence had
    its next token. `pause` is the longest silence, after the fault, of any client that the plan change affected.
    """

    kind: str
    detection: float
    plan: float
    load: float
    prefill: float
    pause: float

    @property
    def bound(self) -> float:
        """Return the longest pause, in seconds, that the coordinator's log explains."""
        return self.detection + self.plan + self.load + self.prefill

    @property
    def over(self) -> bool:
        """Return True if a client waited longer than the coordinator's log explains."""
        return self.pause > self.bound + DELIVERY_SECONDS


def episodes(
    faults: Sequence[Injected], records: Sequence[dict[str, Any]], answers: Sequence[Answer]
) -> list[Episode]:
    """Return one episode for each fault that ended a plan."""
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
    # These silences span the plan change, so their clients waited for it.
    touched = [(start, end) for start, end in gaps if start <= noticed and end >= served[0]]
    rebuilt = next((t for t, message in log if message == REBUILT and t >= served[0]), None)
    if not touched or rebuilt is None:
        rebuilt = served[0]  # no sequence needed a new prefill
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


def silence_during(fault: Injected, answers: Sequence[Answer]) -> float:
    """Return the longest silence of a client, in seconds, that overlaps the fault and its repair."""
    gaps = (gap for a in answers for gap in zip(a.times, a.times[1:], strict=False))
    touched = (end - start for start, end in gaps if start < fault.until and end > fault.at)
    return max(touched, default=0.0)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 95th percentile and maximum of `values`, or zeros if there are none."""
    if not values:
        return 0.0, 0.0, 0.0
    ordered = sorted(values)
    return (
        statistics.median(ordered),
        ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        ordered[-1],
    )
