"""A walk over all event orders of a small cluster. The walk plays the part of the cluster manager.

There is no process, socket or clock. Events go into `apply`, and the walk carries out the actions of `decide` as
`ClusterManager` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from coordinator.cluster import decide, events
from coordinator.cluster.events import apply
from coordinator.cluster.view import STABLE_SECONDS, Member, MemberState, Phase, View
from coordinator.planning.plan import Plan
from proto.errors import ClusterError, MemoryLimitError


def worker(address: str, process: int = 1) -> Member:
    """Return a worker. A restarted worker has another `process`."""
    return Member(address, f"{address}{process}", f"name-{address}", 10**9)


def planner_for(fewest: int, error: Callable[[str], ClusterError] = MemoryLimitError) -> decide.Planner:
    """Return a planner that uses all members in order, and raises `error` if they are fewer than `fewest`."""

    def plan(members: Sequence[Member], epoch: int) -> Plan:
        """Return a plan over `members`."""
        if len(members) < fewest:
            raise error(f"{len(members)} workers are too few")
        stages = [SimpleNamespace(node=member.address) for member in members]
        slowest = 1 / len(members)
        nodes = tuple(member.address for member in members)
        facts = {"nodes": nodes, "group_size": 1, "reason": "", "slowest_seconds": slowest}
        return cast(Plan, SimpleNamespace(epoch=epoch, stages=stages, **facts))

    return plan


@dataclass(frozen=True)
class Step:
    """`event` came `after` seconds, and led from `before` by `actions` to `view`, where `planner` plans."""

    planner: decide.Planner
    before: View
    event: events.Event
    after: float
    actions: tuple[decide.Action, ...]
    view: View

    @property
    def plannable(self) -> bool:
        """Return whether the usable workers could serve now."""
        try:
            self.planner(self.view.usable(), self.view.epoch + 1)
        except ClusterError:
            return False
        return bool(self.view.usable())


def happen(view: View, event: events.Event, planner: decide.Planner, after: float = 0.0) -> Step:
    """Apply one event and carry out all actions that follow from it."""
    now = view.now + after
    following = apply(view, event, now)
    actions: list[decide.Action] = []
    while (action := decide.decide(following, planner)) is not None:
        actions.append(action)
        following = apply(following, _done(action, now), now)
        assert len(actions) < 5, actions
    return Step(planner, view, event, after, tuple(actions), following)


def _done(action: decide.Action, now: float) -> events.Event:
    match action:
        case decide.PreparePlan(_, _, workers):
            return events.PlanPreparing(workers)
        case decide.StartPlan(plan):
            return events.PlanStarting(plan.epoch, tuple(stage.node for stage in plan.stages))
        case decide.StartAlone(epoch):
            return events.PlanStarting(epoch, ())
        case decide.KeepPlan():
            return events.PlanKept()
        case decide.PostponePlan():
            return events.PlanPostponed()
        case decide.HandOver(seconds):
            return events.HandOverStarting(now + seconds)
        case decide.GiveUp(reason):
            return events.GatheringFailed(reason)


def possible(view: View, addresses: str) -> Iterator[tuple[events.Event, float]]:
    """Yield the events that can happen next, with their delays. Delays lie on both sides of every limit."""
    for seconds in (0.6, 3.0, 31.0, 61.0):
        yield events.TimePassed(), seconds
    yield events.TimePassed(open_requests=1), 3.0
    if view.hands_over:
        yield events.TimePassed(open_requests=1, handed_over=True), 0.1
    for address in addresses:
        yield from _news_of(address, view)
    if view.phase in (Phase.STARTING, Phase.SERVING):
        yield events.PlanFailed(view.epoch, "a hop broke"), 0.0
        for address in view.serving:
            yield events.PlanFailed(view.epoch, "it cannot load", address), 0.0
    if view.preparing:
        yield events.PlanPrepared(view.preparing), 0.0
        yield events.PreparationFailed(view.preparing, "it cannot load", "b"), 0.0
        yield events.PreparationFailed(view.preparing, "of no worker"), 0.0
    yield events.PlanPrepared(frozenset({"a1", "of an older preparation"})), 0.0
    yield events.PlanServing(view.epoch), 0.0
    yield events.PlanServing(view.epoch - 1), 0.0
    yield events.PlanFailed(view.epoch - 1, "of an older plan"), 0.0
    if view.phase is Phase.ENDED:
        yield events.GatheringRestarted(), 0.0


def _news_of(address: str, view: View) -> Iterator[tuple[events.Event, float]]:
    member = view.members.get(address)
    yield events.WorkerJoined(worker(address)), 0.0
    yield events.WorkerRefused(worker(address), "has another checkpoint"), 0.0
    if member is not None:
        yield events.WorkerJoined(worker(address, process=2)), 0.0
        yield events.WorkerLost(address, "silent"), 0.0
        yield events.WorkerDraining(address), 0.0
        yield events.WorkerLeft(address), 0.0


def walk(
    start: View, planner: decide.Planner, addresses: str, depth: int, check: Callable[[Step], None]
) -> tuple[int, int]:
    """Walk every order of up to `depth` events over the workers. Return the numbers of steps and of views.

    Views from which the same events lead to the same decisions count as one.
    """
    seen: set[object] = {_key(start)}
    edge, steps = [start], 0
    for _ in range(depth):
        following: list[View] = []
        for view in edge:
            for event, after in possible(view, addresses):
                step = happen(view, event, planner, after)
                check(step)
                steps += 1
                if (key := _key(step.view)) not in seen:
                    seen.add(key)
                    following.append(step.view)
        edge = following
    return steps, len(seen)


LONGEST = max(decide.POSTPONED_SECONDS, STABLE_SECONDS)
"""Seconds. A longer time in a serving plan, or of a ready worker, changes no decision."""


def _key(view: View) -> object:
    """Return the part of a view that decisions depend on. Its times are relative to now and bounded by their limits.

    A wait is the sum of its phases. While a plan loads, the start of the phase has no effect.
    """
    now, settings, serves = view.now, view.settings, view.phase is Phase.SERVING
    limits = (settings.wait, settings.first_wait or 0.0, settings.recovery_wait, decide.LONGEST_PATIENCE)
    waited = min(view.waited, max(limit for limit in limits if limit < math.inf))
    since = min(now - view.since, LONGEST) if serves else 0.0
    until = -1.0 if view.hands_over_until is None else max(view.hands_over_until - now, 0.0)
    times = (round(since, 3), round(waited, 3), round(max(view.retry_at - now, 0.0), 3), round(until, 3))
    flags = (view.recovering, bool(view.alone_problem), bool(view.open_requests), view.handed_over)
    # A plan that starts begins without considered and postponed workers.
    sets = (view.considered, view.postponed) if serves else ()
    members = tuple(_member_key(member, now) for _, member in sorted(view.members.items()))
    return view.phase, view.serving, times, flags, sets, view.preparing, view.prepared, members


def _member_key(member: Member, now: float) -> object:
    """Return the part of a member that decisions depend on. A back-off that has passed has the effect of a join."""
    since = max(member.ready_since - now, -LONGEST) if member.state is MemberState.READY else 0.0
    backoff = max(member.backoff_until - now, since)
    return member.worker_id, member.state, member.failure_count, round(backoff, 3), round(since, 3)
