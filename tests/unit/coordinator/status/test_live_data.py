"""Activity, events, history and latencies: pure functions of successive statuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.view import Phase, Settings, View
from coordinator.serve.live_status import LiveStatus
from coordinator.status.cluster_status import ClusterStatus, NodeStatus, PrefillStatus
from coordinator.status.history import (
    KEPT_SECONDS,
    MAX_SAMPLES,
    SAMPLE_SECONDS,
    EventLog,
    History,
    LatencyLog,
    percentile,
)
from coordinator.web.live_feed import describe_activity

A = NodeStatus("mac-1", "10.0.0.1:1", "0-3", health="ready", stage_ms=10.0)
B = NodeStatus("mac-2", "10.0.0.2:1", "4-7", health="ready", stage_ms=10.0)
SERVING = ClusterStatus(ready=True, model="m", epoch=1, nodes=(A, B), phase="serving")


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (SERVING, "Ready"),
        (replace(SERVING, running=1), "Generating 1 answer"),
        (replace(SERVING, running=3, waiting=2), "Generating 3 answers, 2 queued"),
        (
            replace(SERVING, running=1, prefilling=(PrefillStatus("r", 704, 2812),)),
            "Computing prompts: 704 of 2,812 tokens",
        ),
        (ClusterStatus(False, "m", detail="waiting for workers: 1 of 2"), "Waiting for workers: 1 of 2"),
        (ClusterStatus(False, "m"), "Starting"),
    ],
)
def test_the_activity_is_one_line(status: ClusterStatus, text: str) -> None:
    """The line names the present step and its progress."""
    assert describe_activity(status) == text


def test_a_start_says_how_much_is_loaded() -> None:
    """The detail has the bytes of all workers of the plan, and the problem of the plan before."""
    view = View(Settings(), phase=Phase.STARTING, serving=("a", "b"), problem="mac-3 is lost")
    loads = SimpleNamespace(done={"a": (3_000_000_000, 7_600_000_000), "b": (100_000_000, 7_600_000_000)})
    manager: Any = SimpleNamespace(view=view, loads=loads, describe_gathering=str, clock=lambda: 0.0)
    loop: Any = SimpleNamespace(clock=lambda: 0.0)
    live = LiveStatus(loop, manager, "m", lambda: A)
    assert live._detail(ClusterStatus(False, "m")) == "loading: 3.1 GB of 15.2 GB; mac-3 is lost"


def test_a_loss_and_its_recovery_are_events_with_a_duration() -> None:
    """The recovery names the lost worker and the time from the loss until a plan serves again."""
    events = EventLog()
    assert events.record_status(SERVING, 100.0) == []
    lost = replace(B, health="lost", span=None, detail="silent for 3 s")
    broken = replace(SERVING, ready=False, recoveries=1, nodes=(A, lost))
    assert [e.text for e in events.record_status(broken, 101.0)] == ["mac-2 was lost: silent for 3 s"]
    assert events.record_status(broken, 101.5) == []
    back = replace(broken, ready=True, epoch=2)
    (recovery,) = events.record_status(back, 103.5)
    assert (recovery.kind, recovery.seconds) == ("recovery", 2.5)
    assert recovery.text == "Recovered from the loss of mac-2: 1 machine serves"


def test_joins_leaves_and_new_plans_are_events() -> None:
    """A plan that changes without a failure is no recovery."""
    events = EventLog()
    events.record_status(replace(SERVING, nodes=(A,)), 1.0)
    joined = replace(SERVING, nodes=(A, replace(B, health="idle", span=None)))
    assert [e.text for e in events.record_status(joined, 2.0)] == ["mac-2 joined"]
    assert [e.text for e in events.record_status(replace(SERVING, epoch=2), 3.0)] == ["2 machines serve"]
    assert [e.text for e in events.record_status(replace(SERVING, epoch=2, nodes=(A,)), 4.0)] == ["mac-2 left"]


def test_the_history_has_one_sample_a_second_for_ten_minutes() -> None:
    """Rates come from the counters of one second, and old samples make room."""
    latency = LatencyLog()
    history = History(latency)
    status = replace(SERVING, drafted_by_position=(0,), accepted_by_position=(0,))
    assert history.record_status(status, 1000.0, 0.0) is None
    latency.tokens += 30
    latency.answers.append((0.5, 0.25))
    latency.gaps.append(0.02)
    status = replace(status, drafted_by_position=(10,), accepted_by_position=(7,))
    assert history.record_status(status, 1000.5, 0.5) is None
    sample = history.record_status(status, 1002.0, 2.0)
    assert sample is not None
    assert sample.compact() == [1002.0, 15.0, 0.7, 0, 0, 0.25, 0.25, 0.02, 0.02]
    for second in range(3, MAX_SAMPLES + 10):
        history.record_status(status, 1000.0 + second, float(second))
    assert len(history.samples) == MAX_SAMPLES
    assert history.samples[-1].acceptance is None
    assert history.samples[-1].gap_50 is None


def test_old_latencies_leave_the_percentiles() -> None:
    """Times to the first token count for ten minutes."""
    latency = LatencyLog()
    latency.answers.append((0.0, 9.0))
    latency.answers.append((100.0, 1.0))
    assert latency.first_tokens(KEPT_SECONDS + 50) == [1.0]
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(range(100), 0.95) == 95


@pytest.mark.parametrize(
    ("drafted", "accepted", "expected"),
    [(20, 12, 0.5), (20, 5, None), (8, 7, None), (12, 40, None)],
)
def test_counters_that_went_back_give_no_acceptance(drafted: int, accepted: int, expected: float | None) -> None:
    """A share below 0 or above 1 is left out of the history."""
    history = History(LatencyLog())
    before = replace(SERVING, drafted_by_position=(10,), accepted_by_position=(7,))
    history.record_status(before, 0.0, 0.0)
    after = replace(SERVING, drafted_by_position=(drafted,), accepted_by_position=(accepted,))
    sample = history.record_status(after, 1.0, SAMPLE_SECONDS)
    assert sample is not None
    assert sample.acceptance == expected
