"""Whatever happens to a small cluster, in whatever order: who is planned with, when plans change, how long it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cluster.decide import (
    Action,
    GiveUp,
    KeepPlan,
    Planner,
    StartAlone,
    StartPlan,
    decide,
)
from coordinator.cluster.events import (
    GatheringRestarted,
    PlanFailed,
    PlanServing,
    ReplanRequested,
    TimePassed,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from coordinator.cluster.member import MemberState
from coordinator.cluster.view import Phase, Settings, View
from proto.errors import SpanError
from tests.support.protocol.cluster_walk import Step, happen, planner_for, walk, worker

PATIENT = Settings(nodes=2, wait=5.0, recovery_wait=30.0)
REMOTE = replace(PATIENT, why_not_alone="it serves nothing alone here")


def serving(*addresses: str, planner: Planner, settings: Settings = PATIENT) -> View:
    """A cluster that serves over these workers."""
    view = View(replace(settings, nodes=len(addresses)))
    for address in addresses:
        view = happen(view, WorkerJoined(worker(address)), planner).view
    view = happen(view, PlanServing(1), planner).view
    assert (view.phase, view.serving) == (Phase.SERVING, addresses)
    return view


def check(step: Step) -> None:
    """What holds of every step."""
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
    _check_change(step)
    _check_holds(step)
    _check_done(step)


def _check_action(action: Action, step: Step, limit: float) -> None:
    view, before = step.view, step.before
    match action:
        case StartPlan(plan):
            assert plan.epoch > before.epoch
            for stage in plan.stages:
                member = view.members[stage.node]
                assert member.state is MemberState.READY
                assert member.backoff_until <= view.now
        case StartAlone(epoch):
            assert epoch > before.epoch
            assert not view.settings.why_not_alone
            leaving = [m for m in view.members.values() if m.state is MemberState.DRAINING]
            assert leaving or before.waited + step.after >= 5.0
        case GiveUp(reason):
            assert before.waited + step.after >= limit
            assert reason
        case KeepPlan():
            assert before.serving == view.serving


def _check_change(step: Step) -> None:
    """A plan that serves or starts goes on, unless something was wrong with it or someone wants another."""
    before, event = step.before, step.event
    if before.phase not in (Phase.STARTING, Phase.SERVING) or step.view.epoch == before.epoch:
        return
    failed = isinstance(event, PlanFailed) and event.epoch == before.epoch
    gone = [a for a in before.serving if not _stays(before, step.view, a)]
    wanted = before.replan or isinstance(event, ReplanRequested)
    leaving = any(
        step.view.members[a].state is MemberState.DRAINING for a in before.serving if a not in gone
    )
    assert failed or gone or wanted or leaving, "a plan that works was ended"


def _stays(before: View, view: View, address: str) -> bool:
    member = view.members.get(address)
    if member is None or member.worker_id != before.members[address].worker_id:
        return False
    return member.state in (MemberState.READY, MemberState.DRAINING)


def _check_holds(step: Step) -> None:
    """Losses grow by one at a time and holds are bounded; nobody is released before time."""
    for address, member in step.view.members.items():
        assert member.backoff_until <= step.view.now + 300.0
        before = step.before.members.get(address)
        if before is not None:
            assert member.failure_count - before.failure_count in (-1, 0, 1)
            assert member.backoff_until >= before.backoff_until


def _check_done(step: Step) -> None:
    """Nothing is put off that can be done now: nobody waits for a plan that can be had, nobody is kept from leaving."""
    view, settings = step.view, step.view.settings
    alone = not (settings.why_not_alone or view.alone_problem)
    if view.phase is Phase.GATHERING:
        enough = settings.nodes is not None and len(view.usable()) >= settings.nodes
        over = view.waited >= settings.wait
        if (view.recovering or enough or over) and view.now >= view.retry_at:
            assert not step.plannable, "a plan could be had"
        assert not (alone and over), "this process could serve"
    if view.phase is Phase.SERVING:
        assert not view.replan, "who asked for a plan was not answered"
        states = {view.members[address].state for address in view.serving}
        if MemberState.DRAINING in states:
            assert not (step.plannable or alone), "a worker that wants to leave could"
    if view.phase is Phase.ENDED and step.before.phase is not Phase.ENDED:
        assert isinstance(step.actions[-1], GiveUp), "it ended, and nobody was told why"


@pytest.mark.parametrize("settings", [PATIENT, REMOTE, replace(PATIENT, nodes=None)])
@pytest.mark.parametrize("fewest", [1, 2])
def test_every_order_of_events(settings: Settings, fewest: int) -> None:
    """From the first worker on: where one worker is enough and where both are needed, with and without this machine."""
    planner = planner_for(fewest)
    steps, views = walk(View(settings), planner, "ab", 3, check)
    deeper, more = walk(View(settings), planner, "a", 5, check)
    print(f"{steps + deeper:,} steps from {views + more:,} views")
    assert steps + deeper > 2_500


@pytest.mark.parametrize("settings", [PATIENT, REMOTE])
@pytest.mark.parametrize("fewest", [1, 2])
def test_every_order_of_events_while_serving(settings: Settings, fewest: int) -> None:
    """From a cluster that serves."""
    planner = planner_for(fewest)
    start = serving("a", "b", planner=planner, settings=settings)
    steps, views = walk(start, planner, "ab", 3, check)
    print(f"{steps:,} steps from {views:,} views")
    assert steps > 4_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [PATIENT, REMOTE])
@pytest.mark.parametrize("fewest", [1, 2])
def test_every_order_of_events_at_length(settings: Settings, fewest: int) -> None:
    """Five events from either beginning."""
    planner = planner_for(fewest)
    start = serving("a", "b", planner=planner, settings=settings)
    print("{:,} steps from {:,} views".format(*walk(start, planner, "ab", 5, check)))
    print("{:,} steps from {:,} views".format(*walk(View(settings), planner, "ab", 5, check)))


# ---- single decisions


def test_the_first_plan_waits_for_all_that_were_named() -> None:
    """Two are wanted: one does not start it before the wait is over, the second does at once."""
    planner = planner_for(1)
    one = happen(View(PATIENT), WorkerJoined(worker("a")), planner)
    assert one.actions == ()
    assert [type(a) for a in happen(one.view, WorkerJoined(worker("b")), planner).actions] == [
        StartPlan
    ]
    late = happen(one.view, TimePassed(), planner, after=5.0)
    assert late.view.serving == ("a",)


def test_whoever_is_found_by_chance_waits_for_others() -> None:
    """Nobody said how many there are: the first to be heard does not get all layers at once."""
    planner = planner_for(1)
    one = happen(View(Settings(nodes=None, wait=5.0)), WorkerJoined(worker("a")), planner)
    assert one.actions == ()
    assert happen(one.view, TimePassed(), planner, after=5.0).view.serving == ("a",)


def test_a_lost_worker_is_planned_around_at_once() -> None:
    """No wait where those that are left can serve."""
    planner = planner_for(1)
    view = serving("a", "b", planner=planner)
    after = happen(view, WorkerLost("b", "silent for 3 s"), planner)
    assert after.view.serving == ("a",)
    assert after.view.epoch == view.epoch + 1


def test_a_worker_without_which_nothing_goes_is_waited_for() -> None:
    """Both are needed: the plan waits for the one that is lost, and uses it as soon as it is back."""
    planner = planner_for(2)
    view = happen(serving("a", "b", planner=planner), WorkerLost("b", "silent"), planner).view
    assert (view.phase, view.recovering) == (Phase.GATHERING, True)
    view = happen(view, TimePassed(), planner, after=2.0).view
    assert view.phase is Phase.GATHERING
    assert happen(view, WorkerJoined(worker("b", process=2)), planner).view.serving == ("a", "b")


def test_this_machine_serves_when_workers_do_not_come_back() -> None:
    """After the shorter wait, if it may and can; where it cannot, the longer wait goes on and ends."""
    planner = planner_for(1)
    view = happen(serving("a", planner=planner), WorkerLost("a", "silent"), planner).view
    alone = happen(view, TimePassed(), planner, after=5.0)
    assert [type(a) for a in alone.actions] == [StartAlone]
    too_big = happen(alone.view, PlanFailed(alone.view.epoch, "too little memory"), planner)
    assert (too_big.actions, too_big.view.phase) == ((), Phase.GATHERING)
    over = happen(too_big.view, TimePassed(), planner, after=25.0)
    (end,) = over.actions
    assert isinstance(end, GiveUp)
    assert "too little memory" in end.reason
    assert "name-a" in end.reason
    again = happen(over.view, GatheringRestarted(), planner).view
    assert again.phase is Phase.GATHERING
    assert again.waited == 0.0


def test_pins_that_do_not_fit_are_told_and_not_served_around() -> None:
    """At the start. Later, with clients waiting, this machine is better than nothing."""
    planner = planner_for(2, SpanError)
    view = happen(View(replace(PATIENT, nodes=1)), WorkerJoined(worker("a")), planner).view
    (end,) = happen(view, TimePassed(), planner, after=5.0).actions
    assert isinstance(end, GiveUp)
    assert "too few" in end.reason
    view = happen(serving("a", "b", planner=planner), WorkerLost("b", "silent"), planner).view
    (action,) = happen(view, TimePassed(), planner, after=5.0).actions
    assert isinstance(action, StartAlone)


def test_plans_that_cannot_start_do_not_try_for_ever() -> None:
    """Each try fails and nobody is to blame: tries are spaced, and waiting for them counts."""
    planner = planner_for(1)
    view = happen(
        serving("a", planner=planner, settings=REMOTE), PlanFailed(1, "a hop broke"), planner
    ).view
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
    """A load of minutes that ends in a loss leaves as much patience as there was."""
    planner = planner_for(2)
    view = happen(serving("a", "b", planner=planner), PlanFailed(1, "a hop broke"), planner).view
    assert view.phase is Phase.STARTING
    view = happen(view, TimePassed(), planner, after=200.0).view
    view = happen(view, WorkerLost("b", "silent"), planner).view
    assert (view.phase, view.waited) == (Phase.GATHERING, 0.0)


def test_a_worker_that_leaves_is_planned_around() -> None:
    """Its plan serves until the next one starts; where nobody else can, it serves until it is gone."""
    planner = planner_for(1)
    assert happen(
        serving("a", "b", planner=planner), WorkerDraining("b"), planner
    ).view.serving == ("a",)
    both = planner_for(2)
    view = happen(serving("a", "b", planner=both, settings=REMOTE), WorkerDraining("b"), both).view
    assert (view.phase, view.serving) == (Phase.SERVING, ("a", "b"))
    assert happen(view, WorkerJoined(worker("c")), both).view.serving == ("a", "c")


def test_a_worker_that_joins_is_used_when_asked_for() -> None:
    """It changes nothing by coming; a replan uses it; a replan that finds nothing better keeps the plan."""
    planner = planner_for(1)
    view = serving("a", planner=planner)
    same = happen(view, ReplanRequested(), planner)
    assert [type(a) for a in same.actions] == [KeepPlan]
    assert not same.view.replan
    joined = happen(view, WorkerJoined(worker("b")), planner)
    assert joined.actions == ()
    assert happen(joined.view, ReplanRequested(), planner).view.serving == ("a", "b")


def test_a_replan_asked_for_while_a_plan_starts_follows_it() -> None:
    """The worker that joined since is used, and the one asking need not ask again."""
    planner = planner_for(1)
    view = happen(View(replace(PATIENT, nodes=1)), WorkerJoined(worker("a")), planner).view
    view = happen(view, WorkerJoined(worker("b")), planner).view
    view = happen(view, ReplanRequested(), planner).view
    assert (view.phase, view.serving) == (Phase.STARTING, ("a",))
    assert happen(view, PlanServing(1), planner).view.serving == ("a", "b")


def test_a_worker_that_left_is_forgotten() -> None:
    """Said goodbye: not shown as lost, not waited for."""
    planner = planner_for(1)
    view = happen(serving("a", "b", planner=planner), WorkerDraining("b"), planner).view
    assert set(happen(view, WorkerLeft("b"), planner).view.members) == {"a"}


def test_nothing_is_decided_while_a_plan_starts() -> None:
    """A load is not interrupted by a worker that comes, or by time."""
    planner = planner_for(1)
    view = happen(View(replace(PATIENT, nodes=1)), WorkerJoined(worker("a")), planner).view
    assert view.phase is Phase.STARTING
    assert decide(replace(view, now=view.now + 1e4), planner) is None
