"""The fault schedule of a chaos run depends on its seed alone, and its report detects long pauses and leaks."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from tests.chaos.faults import KINDS, SURVIVOR, schedule
from tests.chaos.load import Answer
from tests.chaos.outages import stretches
from tests.chaos.pauses import Episode, Injected, episodes
from tests.chaos.test_chaos import FAULTS, SEED
from tests.support.processes.resource_use import FEW, ResourceUse, grown

SECONDS = (2.0, 4.0)
HURT, NOTICED, LOADING, SERVING, REBUILT = 100.0, 102.0, 102.5, 103.0, 105.0


def record(at: float, message: str) -> dict[str, Any]:
    return {"time": datetime.fromtimestamp(at, UTC).isoformat(), "message": message}


LOG = [
    record(HURT - 5, "sequences rebuilt"),
    record(NOTICED, "worker lost"),
    record(LOADING, "cluster: loading"),
    record(SERVING, "cluster: serving"),
    record(REBUILT, "sequences rebuilt"),
]


def episode(answer: list[float], log: list[dict[str, Any]] = LOG) -> Episode:
    injected = Injected("stop", HURT, HURT + 10)
    (found,) = episodes([injected], log, [Answer(times=answer)])
    return found


def test_the_seed_determines_the_faults() -> None:
    """A seed gives the same faults again, each kind equally often, and the surviving worker is never ended."""
    long = schedule(3, 20 * len(KINDS), 4, SECONDS)
    assert long == schedule(3, 20 * len(KINDS), 4, SECONDS)
    assert long != schedule(4, 20 * len(KINDS), 4, SECONDS)
    assert Counter(fault.kind for fault in long) == dict.fromkeys(KINDS, 20)
    assert {f.victim for f in long if f.kind in ("kill", "restart")} == {1, 2, 3} - {SURVIVOR}
    assert {f.victim for f in long if f.kind == "stop"} == {0, 1, 2, 3}
    assert all(f.opener != f.victim for f in long)


def test_the_short_run_has_four_kinds_of_fault() -> None:
    """The short run contains kill -9, SIGSTOP, a severed connection and a restart."""
    kinds = {fault.kind for fault in schedule(SEED, FAULTS, 4, SECONDS)}
    assert kinds == {"kill", "stop", "cut", "restart"}


def test_the_log_alone_splits_a_pause() -> None:
    """The bound of a pause comes from the log alone, and a client that waited longer is over it."""
    found = episode([HURT - 1, REBUILT + 0.1, REBUILT + 0.2])
    assert (found.detection, found.plan, found.load, found.prefill) == (2.0, 0.5, 0.5, 2.0)
    assert abs(found.pause - 5.1) < 1e-6
    assert not found.over
    late = episode([HURT - 1, REBUILT + 3.0])
    assert late.bound == found.bound
    assert late.over
    assert episode([HURT - 1, REBUILT], LOG[:-1]).over, "the log said nothing of the rebuilt ones"


def test_unaffected_clients_are_not_counted() -> None:
    """A client that paused before the fault, or came after it, adds neither pause nor prefill."""
    found = episode([SERVING + 1, SERVING + 9])
    assert (found.prefill, found.pause) == (0.0, 0.0)


def test_growing_resources_are_named() -> None:
    """Growth is counted from after the first tenth of a run, and differences up to FEW are ignored."""
    start, early = ResourceUse(5, 3, 5, 50.0), ResourceUse(20, 12, 30, 90.0)
    assert grown([start, early, ResourceUse(20 + FEW, 12, 20, 95.0)]) == []
    assert grown([start, early, ResourceUse(20, 12, 30 + FEW + 1, 90.0)]) == ["tasks 30 to 37"]
    assert grown([start]) == []


def test_every_second_of_a_storm_has_one_part() -> None:
    """The parts of an outage follow each other without a gap, and a plan that only grows is no outage of a fault."""
    joined = {**record(HURT + 7, "changing the plan"), "reason": "w3 joined"}
    log = [
        record(NOTICED, "cluster: waiting for workers"),
        record(NOTICED + 0.1, "pipeline failed"),
        record(LOADING, "cluster: loading"),
        record(SERVING, "cluster: serving"),
        record(SERVING + 0.5, "backups restored"),
        record(REBUILT, "sequences rebuilt"),
        joined,
        record(HURT + 7, "cluster: loading"),
        record(HURT + 8, "cluster: serving"),
        record(HURT + 8.5, "backups restored"),
    ]
    found = list(stretches([HURT], log, HURT - 1, HURT + 9))
    lengths: dict[str, float] = defaultdict(float)
    for one in found:
        lengths[one.part] += one.end - one.start
    wanted = {
        "progress": 3.0,
        "detection": 2.0,
        "plan and load": 1.0,
        "restore": 0.5,
        "prefill": 2.0,
        "growth": 1.5,
    }
    assert {part: round(seconds, 6) for part, seconds in lengths.items()} == wanted
    assert all(a.end == b.start for a, b in pairwise(found))
