"""Events change the view of the cluster. Back-offs grow with failures, and time lowers the failure count."""

from __future__ import annotations

import pytest

from coordinator.cluster.events import (
    Event,
    GatheringFailed,
    GatheringRestarted,
    GroupMeasured,
    ModelChanged,
    PlanFailed,
    PlanServing,
    PlanStarting,
    TimePassed,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRefused,
    apply,
)
from coordinator.cluster.view import (
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    STABLE_SECONDS,
    Member,
    Phase,
    Settings,
    View,
)
from tests.support.protocol.cluster_walk import worker


def after(view: View, *events: Event, seconds: float = 0.0) -> View:
    """Return the view after these events, all of them `seconds` later."""
    now = view.now + seconds
    for event in events:
        view = apply(view, event, now)
    return view


@pytest.fixture
def view() -> View:
    """Return the view of a cluster over one worker that serves."""
    return after(View(Settings()), WorkerJoined(worker("a")), PlanStarting(1, ("a",)), PlanServing(1))


def member(view: View) -> Member:
    return view.members["a"]


def back_offs(view: View, fault: Event, times: int) -> list[float]:
    """Return the back-off in seconds after each of `times` failures of a worker that returns at once."""
    found = []
    for _ in range(times):
        view = after(view, fault)
        found.append(max(0.0, member(view).backoff_until - view.now))
        view = after(view, WorkerJoined(worker("a", 2)), seconds=found[-1])
    return found


def test_back_offs_double_with_each_failure(view: View) -> None:
    """After one loss a worker may return at once. Later back-offs double up to the longest."""
    found = back_offs(view, WorkerLost("a", "silent"), 12)
    assert found[:5] == [0.0, 2.0, 4.0, 8.0, 16.0]
    assert found[-1] == LONGEST_BACKOFF


def test_a_back_off_counts_from_the_failure(view: View) -> None:
    """Neither a refusal nor a restart shortens a back-off. Only time ends it."""
    view = after(view, WorkerLost("a", "silent"), WorkerJoined(worker("a")), WorkerLost("a", "silent"))
    until = member(view).backoff_until
    assert until == view.now + FIRST_BACKOFF
    view = after(
        view,
        WorkerRefused(worker("a"), "serves another"),
        WorkerJoined(worker("a", 2)),
        seconds=1.0,
    )
    assert member(view).backoff_until == until
    assert not member(view).usable(view.now)
    assert member(after(view, TimePassed(), seconds=1.0)).usable(until)


def test_failures_are_forgiven_one_by_one(view: View) -> None:
    """Each minute of a ready worker lowers its failure count by one. A lost worker keeps its count."""
    view = after(view, WorkerLost("a", "silent"), WorkerJoined(worker("a")), WorkerLost("a", "silent"))
    lost = after(view, TimePassed(), seconds=10 * STABLE_SECONDS)
    assert member(lost).failure_count == 2
    view = after(view, WorkerJoined(worker("a")))
    view = after(view, TimePassed(), seconds=STABLE_SECONDS)  # two of these seconds it was held
    assert member(view).failure_count == 2
    view = after(view, TimePassed(), seconds=FIRST_BACKOFF)
    assert member(view).failure_count == 1
    view = after(view, TimePassed(), TimePassed(), seconds=STABLE_SECONDS)
    assert member(view).failure_count == 0


def test_a_worker_that_fails_a_start_backs_off_at_once() -> None:
    """A worker that could not load backs off at once. One whose plan had served may return once."""
    start = after(View(Settings()), WorkerJoined(worker("a")), PlanStarting(1, ("a",)))
    failed = after(start, PlanFailed(1, "cannot load", "a"))
    assert member(failed).backoff_until == failed.now + FIRST_BACKOFF
    served = after(start, PlanServing(1), PlanFailed(1, "its engine failed", "a"))
    assert member(served).usable(served.now)
    assert member(served).failure_count == 1


def test_a_plan_ends_with_any_of_its_workers(view: View) -> None:
    """A plan ends when a worker is lost, refused or restarted, and not when one is draining."""
    ends: tuple[Event, ...] = (
        WorkerLost("a", "silent"),
        WorkerRefused(worker("a"), "another checkpoint"),
        WorkerJoined(worker("a", 2)),
    )
    for event in ends:
        ended = after(view, event)
        assert (ended.phase, ended.serving, ended.recovering) == (Phase.GATHERING, (), True)
        assert ended.problem
    assert after(view, WorkerDraining("a"), WorkerJoined(worker("b")), WorkerLost("b", "x")).phase is Phase.SERVING


def test_another_model_needs_another_plan(view: View) -> None:
    """The plan ends, its workers stay, and the next plan may start at once. Sums of its rows are measured anew."""
    changed = after(view, GroupMeasured(("a",), 0.05), ModelChanged("too large"))
    assert (changed.phase, changed.serving, changed.recovering) == (Phase.GATHERING, (), True)
    assert changed.members == view.members
    assert (changed.settings.why_not_alone, changed.waited) == ("too large", 0.0)


def test_waiting_is_counted_over_plans_that_do_not_start(view: View) -> None:
    """Only a plan that serves, or a new wait, restarts the count of waited seconds."""
    view = after(view, WorkerLost("a", "silent"))
    view = after(view, WorkerJoined(worker("a")), PlanStarting(2, ("a",)), seconds=3.0)
    view = after(view, PlanFailed(2, "no link"), seconds=10.0)
    assert view.waited == 3.0
    view = after(view, TimePassed(), seconds=1.0)
    assert view.waited == 4.0
    assert after(view, PlanStarting(3, ("a",)), PlanServing(3)).waited == 0.0
    assert after(view, GatheringFailed("no plan"), GatheringRestarted()).waited == 0.0
