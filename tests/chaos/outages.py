"""The time of a storm by what the cluster did with it, from the times of the faults and the coordinator's log.

Every second of the storm belongs to one part, so the parts show what bounds the throughput.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from tests.chaos.pauses import LOADING, REBUILT, SERVING, spread

CHANGING, FAILED, WAITING = (
    "changing the plan",
    "pipeline failed",
    "cluster: waiting for workers",
)
RESTORED = "backups restored"

PARTS = ("detection", "plan and load", "restore", "prefill", "growth", "progress")
"""`growth` is the plan, load and restore of a plan whose only reason is a worker that joined. `prefill` lasts until all
answers of the previous plan are computed again; other answers may have tokens meanwhile. `progress` is the rest."""

AFTER = {LOADING: "plan and load", SERVING: "restore", RESTORED: "prefill", REBUILT: "progress"}
"""The part that begins with a record."""


@dataclass(frozen=True)
class Stretch:
    """The seconds from `start` to `end`, which belong to `part`."""

    part: str
    start: float
    end: float


def stretches(
    faults: Sequence[float], records: Sequence[dict[str, Any]], started: float, ended: float
) -> Iterator[Stretch]:
    """Yield the stretches of a storm with faults at these times, from `started` to `ended`, in seconds since 1970."""
    marks = [(started, "progress")]
    fault = iter(sorted(faults))
    latest, following = 0.0, next(fault, ended)
    for record in records:
        at = datetime.fromisoformat(record["time"]).timestamp()
        while following <= at:
            latest, following = following, next(fault, float("inf"))
        if not started <= at < ended:
            continue
        part = AFTER.get(record["message"])
        if record["message"] == CHANGING and record.get("reason", "").endswith("joined"):
            part = "growth"
        elif record["message"] in (CHANGING, FAILED, WAITING):
            part = "plan and load"
            if marks[-1][1] in ("progress", "prefill") and latest > marks[-1][0]:
                marks.append((latest, "detection"))
        growing = marks[-1][1] == "growth" and part in ("plan and load", "restore")
        if part and not growing:
            marks.append((at, part))
    for (start, part), (end, _) in pairwise([*marks, (ended, "")]):
        if end > start:
            yield Stretch(part, start, end)


def table(found: Sequence[Stretch]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table: the share of each part, how often it occurred, and its lengths."""
    total = sum(one.end - one.start for one in found)
    for part in PARTS:
        lengths = [one.end - one.start for one in found if one.part == part]
        if not lengths:
            continue
        median, _, longest = spread(lengths)
        shown = f"{sum(lengths) / total:5.1%}, {len(lengths)} times"
        yield part, f"{shown}, median {median:.2f}, most {longest:.2f} s"
