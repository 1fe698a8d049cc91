"""Decisions about a small cluster for every order of events: its plans, their changes and the waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cluster import decide
from coordinator.cluster.events import (
    GatheringRestarted,
    PlanFailed,
    PlanPrepared,
    PlanServing,
    PreparationFailed,
    TimePassed,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from coordinator.cluster.view import (
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    MOST_FAILURES,
    Member,
    MemberState,
    Phase,
    Settings,
    View,
)
from coordinator.planning.plan import LayerGapError, Plan
from proto.errors import SpanError
from tests.support.protocol.cluster_walk import Step, happen, planner_for, walk, worker

PATIENT = Settings(nodes=2, wait=5.0, recovery_wait=30.0)
REQUIRED = replace(PATIENT, nodes_required=True, first_wait=math.inf)
"""The settings of `serve --nodes 2`, which waits without end for the first plan."""
REMOTE = replace(PATIENT, why_not_alone="it serves nothing alone here")


def serving(*addresses: str, planner: decide.Planner, settings: Settings = PATIENT) -> View:
    """Return a cluster that serves over these workers."""
    view = View(replace(settings, nodes=len(addresses)))
    for address in addresses:
        view = happen(view, WorkerJoined(worker(address)), planner).view
    view = happen(view, PlanServing(1), planner).view
    assert (view.phase, view.serving) == (Phase.SERVING, addresses)
    return view


def check(step: Step) -> None:
    """Check what holds for every step."""
    before, view = step.before, step.view
    limit = view.settings.recovery_wait if view.recovering else view.settings.wait
    for action in step.actions:
        _check_action(action, step, limit)
    if step.view.phase in (Phase.STARTING, Phase.SERVING):
        for address in view.serving:
            assert view.members[address].state in (MemberState.READY, MemberState.DRAINING)
    else:
        assert view.serving == ()
    if view.phase is Phase.GATHERING:
        assert view.waited < limit, "the wait is over and nothing was done"
    assert view.epoch >= before.epoch
    if before.recovering or before.phase is Phase.SERVING:
        assert view.recovering or view.phase is Phase.SERVING, "it waits as before the first plan"
    ready = {m.worker_id for m in view.members.values() if m.state is MemberState.READY}
    assert view.preparing | view.prepared <= ready
    assert view.phase is Phase.SERVING or not view.preparing
    if isinstance((step.actions or (None,))[-1], decide.KeepPlan):
        assert not view.preparing, "nothing is prepared, and nobody reports its end"
    _check_change(step)
    _check_holds(step)
    _check_done(step)


def _check_action(action: decide.Action, step: Step, limit: float) -> None:
    view, before = step.view, step.before
    match action:
        case decide.StartPlan(plan):
            assert plan.epoch > before.epoch
            for stage in plan.stages:
                member = view.members[stage.node]
                assert member.state is MemberState.READY
                assert member.backoff_until <= view.now or _is_last_resort(step)
        case decide.StartAlone(epoch):
            assert epoch > before.epoch
            assert not view.settings.why_not_alone
            leaving = [m for m in view.members.values() if m.state is MemberState.DRAINING]
            assert leaving or before.waited + step.after >= 5.0
        case decide.GiveUp(reason):
            assert before.waited + step.after >= limit
            assert reason
        case decide.KeepPlan() | decide.PostponePlan() | decide.HandOver():
            assert before.serving == view.serving
        case decide.PreparePlan(plan):
            assert before.serving == view.serving
            assert any(stage.node not in view.serving for stage in plan.stages)


def _is_last_resort(step: Step) -> bool:
    """Return whether back-offs end early: a recovery has waited, and this process cannot serve."""
    before = step.before
    stuck = before.settings.why_not_alone or before.alone_problem
    patience = FIRST_BACKOFF if stuck else decide.LONGEST_PATIENCE
    return before.recovering and before.waited + step.after >= patience


def _check_change(step: Step) -> None:
    """Check that a plan ends only for a failure, or workers that leave or join."""
    before, event = step.before, step.event
    if before.phase not in (Phase.STARTING, Phase.SERVING) or step.view.epoch == before.epoch:
        return
    failed = isinstance(event, PlanFailed) and event.epoch == before.epoch
    if before.hands_over and isinstance(event, TimePassed) and event.open_requests and not event.handed_over:
        assert step.view.now >= (before.hands_over_until or 0.0), "open answers were lost"
    gone = [a for a in before.serving if not _stays(before, step.view, a)]
    leaving = any(step.view.members[a].state is MemberState.DRAINING for a in before.serving if a not in gone)
    joined = set(step.view.serving) > set(before.serving)
    assert failed or gone or leaving or joined, "a working plan was ended"


def _stays(before: View, view: View, address: str) -> bool:
    member = view.members.get(address)
    if member is None or member.worker_id != before.members[address].worker_id:
        return False
    return member.state in (MemberState.READY, MemberState.DRAINING)


def _check_holds(step: Step) -> None:
    """Check that the failure count changes by one at a time, and that back-offs are bounded and never shortened."""
    for address, member in step.view.members.items():
        assert member.backoff_until <= step.view.now + LONGEST_BACKOFF
        before = step.before.members.get(address)
        if before is not None:
            assert member.failure_count - before.failure_count in (-1, 0, 1)
            assert member.backoff_until >= before.backoff_until


def _check_done(step: Step) -> None:
    """No possible action is delayed: a plan starts when it can, and a draining worker may leave."""
    view, settings = step.view, step.view.settings
    alone = not (settings.why_not_alone or view.alone_problem)
    if view.phase is Phase.GATHERING:
        enough = settings.nodes is not None and len(view.usable()) >= settings.nodes
        over = view.waited >= settings.wait
        if (view.recovering or enough or over) and view.now >= view.retry_at:
            assert not step.plannable, "a plan was possible"
        assert not (alone and over), "this process could serve"
    if view.phase is Phase.SERVING:
        waiting = bool(view.preparing) or view.hands_over or view.now < view.retry_at
        states = {view.members[address].state for address in view.serving}
        if MemberState.DRAINING in states:
            assert waiting or not (step.plannable or alone), "a draining worker was kept"
    if view.phase is Phase.ENDED and step.before.phase is not Phase.ENDED:
        assert isinstance(step.actions[-1], decide.GiveUp), "it ended without a reason"


ANY_NUMBER = replace(PATIENT, nodes=None)
SHORT = [
    ("ab", 3, PATIENT, 1),
    ("ab", 3, REMOTE, 2),
    ("ab", 3, REQUIRED, 1),
    ("a", 4, PATIENT, 1),
    ("", 3, PATIENT, 1),
    ("", 3, REMOTE, 2),
    ("", 3, ANY_NUMBER, 1),
]
"""Who serves, the number of events, and how many workers are enough. Where only `a` serves, `b` may come."""

MORE = [
    ("ab", 3, PATIENT, 2),
    ("ab", 3, REMOTE, 1),
    ("ab", 3, REQUIRED, 2),
    ("a", 4, REMOTE, 1),
    ("a", 4, REQUIRED, 1),
    ("", 3, PATIENT, 2),
    ("", 3, REMOTE, 1),
    ("", 3, ANY_NUMBER, 2),
]
LONG = [(serves, 5, one, n) for serves in ("", "ab") for one in (PATIENT, REMOTE) for n in (1, 2)]


@pytest.mark.parametrize(
    ("serves", "depth", "settings", "fewest"),
    [
        *SHORT,
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE),
        *(pytest.param(*c, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for c in LONG),
    ],
)
def test_every_order_of_events(serves: str, depth: int, settings: Settings, fewest: int) -> None:
    """Every order of events of two workers, from the start and while some serve. One worker has longer orders."""
    planner = planner_for(fewest)
    start = serving(*serves, planner=planner, settings=settings) if serves else View(settings)
    found = [walk(start, planner, "ab", depth, check)]
    if not serves:
        found.append(walk(start, planner, "a", 5, check))
    print("; ".join(f"{steps:,} steps from {views:,} views" for steps, views in found))
    assert sum(steps for steps, _ in found) > {"": 2_500, "ab": 1_000, "a": 8_000}[serves]


# ---- single decisions


def test_a_change_of_plan_that_fails_does_not_wait_for_all_workers() -> None:
    """Answers are open then, so the rest of the workers serve at once, also if `--nodes` asked for more."""
    planner = planner_for(1)
    view = serving("a", "b", planner=planner, settings=REQUIRED)
    view = happen(view, WorkerLost("b", "silent for 3 s"), planner).view
    view = happen(view, PlanServing(view.epoch), planner).view
    view = happen(view, WorkerJoined(worker("b")), planner).view
    view = happen(view, TimePassed(), planner, after=2.0).view
    view = happen(view, PlanPrepared(view.preparing), planner).view
    assert (view.phase, view.serving) == (Phase.STARTING, ("a", "b"))
    lost = happen(view, WorkerLost("b", "silent for 3 s"), planner).view
    assert (lost.phase, lost.serving) == (Phase.STARTING, ("a",))


@pytest.mark.parametrize("fault", ["it crashes in use", "it crashes at once"])
def test_a_worker_that_failed_for_hours_is_back_within_a_minute(fault: str) -> None:
    """Hundreds of failures neither raise nor delay a recovered worker, and ten quiet minutes forgive them."""
    planner = planner_for(1)
    view = serving("a", planner=planner, settings=PATIENT)
    end, process = view.now + 4 * 3600.0, 1

    def tick(view: View, seconds: float = 1.0) -> View:
        """Let time pass, in which every preparation and start succeeds."""
        view = happen(view, TimePassed(), planner, after=seconds).view
        if view.preparing:
            view = happen(view, PlanPrepared(view.preparing), planner).view
        return happen(view, PlanServing(view.epoch), planner).view

    while view.now < end:
        process += 1
        view = happen(view, WorkerJoined(worker("b", process)), planner).view
        for _ in range(8):
            view = tick(view)
            if fault == "it crashes at once" or "b" in view.serving:
                break
        if fault == "it crashes at once" or "b" in view.serving:
            view = happen(view, WorkerLost("b", "its process ended"), planner).view
            view = tick(view, seconds=9.0)
    assert process > 800
    view = happen(view, WorkerJoined(worker("b", process + 1)), planner).view
    recovered = view.now
    while "b" not in view.serving:
        view = tick(view)
        assert view.now <= recovered + 60.0
    for _ in range(600):
        view = tick(view)
    assert view.members["b"].failure_count == 0


@pytest.mark.parametrize("nodes", [2, None])
def test_the_first_plan_waits_for_other_workers(nodes: int | None) -> None:
    """The first worker does not get all layers at once. The second of two named workers starts the plan."""
    planner = planner_for(1)
    one = happen(View(replace(PATIENT, nodes=nodes)), WorkerJoined(worker("a")), planner)
    assert one.actions == ()
    two = happen(one.view, WorkerJoined(worker("b")), planner)
    assert [type(a) for a in two.actions] == ([decide.StartPlan] if nodes else [])
    late = happen(one.view, TimePassed(), planner, after=5.0)
    assert late.view.serving == ("a",)


@pytest.mark.parametrize(
    ("settings", "others", "after"),
    [(REMOTE, 0, 2.0), (replace(PATIENT, wait=600.0), 0, 6.0), (REMOTE, 1, None)],
    ids=["needed", "needed and a long wait", "not needed"],
)
def test_a_back_off_does_not_stop_the_only_plan(settings: Settings, others: int, after: float | None) -> None:
    """Answers wait for a worker that failed often only while it might be replaced, not for minutes."""
    planner = planner_for(1)
    view = serving("a", planner=planner, settings=settings)
    for number in range(others):
        view = happen(view, WorkerJoined(worker(f"b{number}")), planner).view
    failing = replace(view.members["a"], failure_count=MOST_FAILURES)
    view = replace(view, members={**view.members, "a": failing})
    failed = happen(view, PlanFailed(view.epoch, "its engine failed", "a"), planner).view
    assert failed.members["a"].backoff_until - failed.now == LONGEST_BACKOFF
    if after is None:
        assert failed.serving == ("b0",)
        return
    assert failed.phase is Phase.GATHERING
    early = happen(failed, TimePassed(), planner, after=after / 2).view
    assert early.phase is Phase.GATHERING
    assert happen(early, TimePassed(), planner, after=after / 2).view.serving == ("a",)


def test_this_machine_serves_when_workers_do_not_come_back() -> None:
    """This process serves after the shorter wait if it can. Otherwise the longer wait continues and ends."""
    planner = planner_for(1)
    view = happen(serving("a", planner=planner), WorkerLost("a", "silent"), planner).view
    alone = happen(view, TimePassed(), planner, after=5.0)
    assert [type(a) for a in alone.actions] == [decide.StartAlone]
    too_big = happen(alone.view, PlanFailed(alone.view.epoch, "too little memory"), planner)
    assert (too_big.actions, too_big.view.phase) == ((), Phase.GATHERING)
    over = happen(too_big.view, TimePassed(), planner, after=25.0)
    (end,) = over.actions
    assert isinstance(end, decide.GiveUp)
    assert "too little memory" in end.reason
    assert "name-a" in end.reason
    again = happen(over.view, GatheringRestarted(), planner).view
    assert again.phase is Phase.GATHERING
    assert again.waited == 0.0


def test_the_end_names_each_lost_worker_once() -> None:
    """The reason of the end has one sentence for a lost worker, also where that was the last problem."""
    planner = planner_for(1)
    view = serving("h:1", planner=planner, settings=REMOTE)
    view = happen(view, WorkerLost("h:1", "h:1 is lost: it was silent"), planner).view
    (end,) = happen(view, TimePassed(), planner, after=60.0).actions
    assert isinstance(end, decide.GiveUp)
    assert end.reason.count("is lost") == 1, end.reason


def test_pinned_layers_that_do_not_fit_are_an_error() -> None:
    """At the start they are an error. During a recovery this process serves instead."""
    planner = planner_for(2, SpanError)
    view = happen(View(replace(PATIENT, nodes=1)), WorkerJoined(worker("a")), planner).view
    (end,) = happen(view, TimePassed(), planner, after=5.0).actions
    assert isinstance(end, decide.GiveUp)
    assert "too few" in end.reason
    view = happen(serving("a", "b", planner=planner), WorkerLost("b", "silent"), planner).view
    (action,) = happen(view, TimePassed(), planner, after=5.0).actions
    assert isinstance(action, decide.StartAlone)


def test_plans_that_cannot_start_are_tried_for_a_bounded_time() -> None:
    """Failed starts without a suspect are spaced, and their waits count."""
    planner = planner_for(1)
    view = happen(serving("a", planner=planner, settings=REMOTE), PlanFailed(1, "a hop broke"), planner).view
    tries, started = 0, view.now
    while view.phase is not Phase.ENDED:
        if view.phase is Phase.STARTING:
            tries += 1
            view = happen(view, PlanFailed(view.epoch, "no link"), planner).view
        else:
            view = happen(view, TimePassed(), planner, after=0.1).view
    assert 10 < tries < 100
    assert 30.0 <= view.now - started < 31.0


def test_time_spent_loading_is_not_time_spent_waiting() -> None:
    """A load of minutes that ends in a loss does not shorten the wait."""
    planner = planner_for(2)
    view = happen(serving("a", "b", planner=planner), PlanFailed(1, "a hop broke"), planner).view
    assert view.phase is Phase.STARTING
    view = happen(view, TimePassed(), planner, after=200.0).view
    view = happen(view, WorkerLost("b", "silent"), planner).view
    assert (view.phase, view.waited) == (Phase.GATHERING, 0.0)


def test_a_worker_that_leaves_is_planned_around() -> None:
    """The old plan serves until the next one starts, or until the draining worker is gone."""
    planner = planner_for(1)
    assert happen(serving("a", "b", planner=planner), WorkerDraining("b"), planner).view.serving == ("a",)
    both = planner_for(2)
    view = happen(serving("a", "b", planner=both, settings=REMOTE), WorkerDraining("b"), both).view
    assert (view.phase, view.serving) == (Phase.SERVING, ("a", "b"))
    view = happen(view, WorkerJoined(worker("c")), both).view
    assert view.serving == ("a", "b"), "it serves until the other one has loaded"
    assert prepared(view, both).serving == ("a", "c")


def test_a_worker_that_left_is_forgotten() -> None:
    """A worker that left on its own is neither shown as lost nor waited for."""
    planner = planner_for(1)
    view = happen(serving("a", "b", planner=planner), WorkerDraining("b"), planner).view
    assert set(happen(view, WorkerLeft("b"), planner).view.members) == {"a"}


# ---- required workers


def test_required_workers_are_waited_for_without_a_limit() -> None:
    """With --nodes the first plan waits for the last worker, and this process does not serve alone."""
    planner = planner_for(1)
    settings = Settings(nodes=2, nodes_required=True, wait=5.0, first_wait=math.inf)
    view = happen(View(settings), WorkerJoined(worker("a")), planner).view
    late = happen(view, TimePassed(), planner, after=3600.0)
    assert (late.actions, late.view.phase) == ((), Phase.GATHERING)
    assert happen(late.view, WorkerJoined(worker("b")), planner).view.serving == ("a", "b")


def test_too_few_required_workers_are_an_error_after_the_wait() -> None:
    """The reason counts the workers and names the flags."""
    planner = planner_for(1)
    settings = Settings(nodes=2, nodes_required=True, wait=20.0, first_wait=20.0)
    none = View(settings)
    for view, ready in ((happen(none, WorkerJoined(worker("a")), planner).view, 1), (none, 0)):
        (end,) = happen(view, TimePassed(), planner, after=20.0).actions
        assert isinstance(end, decide.GiveUp)
        assert f"{ready} of 2 workers are ready" in end.reason
        assert "--alone-ok" in end.reason
        assert ("--nodes 1, " in end.reason) == (ready == 1), "without a worker, none helps"


def test_after_a_failure_fewer_than_the_required_workers_serve() -> None:
    """The number of workers is required for the first plan only."""
    planner = planner_for(1)
    settings = replace(PATIENT, nodes_required=True, first_wait=math.inf)
    view = happen(serving("a", "b", planner=planner, settings=settings), WorkerLost("b", "x"), planner).view
    assert view.serving == ("a",)
    view = happen(view, WorkerLost("a", "x"), planner).view
    assert [type(a) for a in happen(view, TimePassed(), planner, after=5.0).actions] == [decide.StartAlone]


def test_a_gap_between_pinned_layers_waits_for_another_worker() -> None:
    """A worker that can fill the gap may still join, so the start is not an error before `first_wait`."""
    planner = planner_for(2, LayerGapError)
    settings = Settings(nodes=1, wait=5.0, first_wait=math.inf)
    view = happen(View(settings), WorkerJoined(worker("a")), planner).view
    late = happen(view, TimePassed(), planner, after=60.0)
    assert (late.actions, late.view.phase) == ((), Phase.GATHERING)
    assert decide.describe_wait(late.view, planner).startswith("1 of 1, but 1 workers are too few")
    assert not decide.describe_wait(late.view, planner).endswith(".")
    assert happen(late.view, WorkerJoined(worker("b")), planner).view.serving == ("a", "b")
    bounded = replace(view, settings=replace(settings, first_wait=10.0))
    assert isinstance(happen(bounded, TimePassed(), planner, after=10.0).actions[-1], decide.GiveUp)


# ---- workers that join


def prepared(view: View, planner: decide.Planner) -> View:
    """Return the view after the new workers have loaded beside the plan in force."""
    assert view.preparing
    return happen(view, PlanPrepared(view.preparing), planner).view


def joined(settings: Settings, planner: decide.Planner, **member: Any) -> View:
    """Return a cluster that serves over `a` and that `b` has joined since."""
    view = serving("a", planner=planner, settings=settings)
    view = happen(view, TimePassed(), planner, after=60.0).view
    return happen(view, WorkerJoined(replace(worker("b"), **member)), planner).view


def test_a_joined_worker_is_used_at_a_quiet_moment() -> None:
    """It is used two seconds after its join, so that several workers cause one change."""
    planner = planner_for(1)
    view = joined(PATIENT, planner)
    early = happen(view, TimePassed(), planner, after=1.9)
    assert early.actions == ()
    step = happen(early.view, TimePassed(), planner, after=0.1)
    (action,) = step.actions
    assert isinstance(action, decide.PreparePlan)
    assert action.reason == "name-b joined"
    (action,) = happen(step.view, PlanPrepared(step.view.preparing), planner).actions
    assert isinstance(action, decide.StartPlan)
    assert action.reason == "name-b joined"


def test_a_change_waits_for_open_answers() -> None:
    """It is postponed once, and follows when no answer is open, or when they are handed over after a minute."""
    planner = planner_for(1)
    view = happen(joined(PATIENT, planner), TimePassed(1), planner, after=2.0).view
    step = happen(view, PlanPrepared(view.preparing), planner)
    assert step.actions == (decide.PostponePlan(("name-b",)),)
    busy = happen(step.view, TimePassed(1), planner, after=decide.POSTPONED_SECONDS - 3.0)
    assert busy.actions == ()
    assert happen(busy.view, TimePassed(), planner).view.serving == ("a", "b")
    minute = happen(busy.view, TimePassed(1), planner, after=1.0)
    assert minute.actions == (decide.HandOver(decide.JOIN_SECONDS),)
    waits = happen(minute.view, TimePassed(1), planner, after=decide.JOIN_SECONDS - 1.0)
    assert waits.actions == (), "no backup has room for a long prompt"
    assert happen(waits.view, TimePassed(1, handed_over=True), planner).view.serving == ("a", "b")
    assert happen(waits.view, TimePassed(), planner).view.serving == ("a", "b"), "the prompt's client has left"
    assert happen(waits.view, TimePassed(1), planner, after=1.0).view.serving == ("a", "b"), "not for ever"


def test_a_worker_that_leaves_waits_until_answers_are_handed_over() -> None:
    """It waits for 20 s in all, so the plan changes in time without what is not backed up."""
    planner = planner_for(1)
    view = prepared(happen(joined(PATIENT, planner), TimePassed(), planner, after=2.0).view, planner)
    assert view.serving == ("a", "b")
    view = happen(happen(view, PlanServing(view.epoch), planner).view, TimePassed(1), planner).view
    step = happen(view, WorkerDraining("b"), planner)
    assert step.actions == (decide.HandOver(decide.LEAVE_SECONDS),)
    assert happen(step.view, TimePassed(1), planner, after=decide.LEAVE_SECONDS - 1.0).actions == ()
    for handed_over, after in ((True, 0.1), (False, decide.LEAVE_SECONDS)):
        assert happen(step.view, TimePassed(1, handed_over), planner, after=after).view.serving == ("a",)
    lost = happen(step.view, WorkerLost("a", "silent"), planner).view
    assert lost.hands_over_until is None, "answers do not pause for a plan that has failed"


@pytest.mark.parametrize(("faster", "used"), [(0.97, False), (0.9, True)])
def test_an_equal_worker_replaces_none(faster: float, used: bool) -> None:
    """A plan over as many workers is used if it is faster by more than measurements differ."""

    def pick_one(members: Sequence[Member], epoch: int) -> Plan:
        best = max(members, key=lambda member: member.address)
        plan = planner_for(1)([best], epoch)
        seconds = faster if best.address == worker("b").address else 1.0
        return cast(Plan, SimpleNamespace(**{**vars(plan), "slowest_seconds": seconds}))

    step = happen(joined(PATIENT, pick_one), TimePassed(), pick_one, after=2.0)
    (action,) = step.actions
    assert isinstance(action, decide.PreparePlan if used else decide.KeepPlan)


def test_a_worker_that_cannot_load_does_not_end_the_plan() -> None:
    """It backs off after each failure, and is tried again."""
    planner = planner_for(1)
    view = happen(joined(PATIENT, planner), TimePassed(), planner, after=2.0).view
    for tries in (1, 2, 3):
        view = happen(view, PreparationFailed(view.preparing, "too little memory", "b"), planner).view
        assert (view.phase, view.serving) == (Phase.SERVING, ("a",))
        assert view.members["b"].backoff_until == view.now + 2.0**tries
        step = happen(view, TimePassed(), planner, after=2.0**tries)
        assert [type(a) for a in step.actions] == [decide.PreparePlan]
        view = step.view
    assert prepared(view, planner).serving == ("a", "b")


def test_a_plan_that_fails_while_the_next_one_is_prepared_is_replaced() -> None:
    """The recovery uses the new worker, whether it has loaded or not."""
    planner = planner_for(1)
    view = happen(joined(PATIENT, planner), TimePassed(), planner, after=2.0).view
    step = happen(view, PlanFailed(1, "a hop broke"), planner)
    assert step.view.serving == ("a", "b")
    assert not step.view.preparing
    assert happen(step.view, PlanPrepared(view.preparing), planner).actions == ()


def test_a_worker_that_fails_again_and_again_does_not_keep_another_from_being_used() -> None:
    """`b` loads for ten minutes. `c` fails at once, whenever its back-off ends."""
    planner = planner_for(1)
    view = happen(joined(PATIENT, planner), WorkerJoined(worker("c")), planner).view
    view = happen(view, TimePassed(), planner, after=2.0).view
    assert len(view.preparing) == 3
    view = happen(view, PreparationFailed(view.preparing, "too little memory", "c"), planner).view
    view = happen(view, TimePassed(), planner, after=1.0).view
    began = view.preparing
    assert began == {"a1", "b1"}
    for _ in range(600):
        view = happen(view, TimePassed(), planner, after=1.0).view
        assert view.preparing == began
    assert prepared(view, planner).serving == ("a", "b")
