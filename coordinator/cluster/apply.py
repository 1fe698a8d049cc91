"""The effect of each event on the view of the cluster. Pure: no clock, no sockets."""

from __future__ import annotations

from dataclasses import replace

from coordinator.cluster import events
from coordinator.cluster.view import FIRST_BACKOFF, MemberState, Phase, View

RETRY_SECONDS = 0.5
"""Seconds. Pause after a plan that could not start for a reason that no worker is known to have caused."""


def apply(view: View, event: events.Event, now: float) -> View:
    """Return the view after `event`, which happened at `now`."""
    view = replace(view, now=now)
    if isinstance(event, events.MemberEvent):
        following = _with_member_event(view, event)
        ready = {m.worker_id for m in following.members.values() if m.state is MemberState.READY}
        if not view.preparing | view.prepared <= ready:  # a worker may have lost its stage
            following = _without_preparation(following)
        return _end_plan_without_its_workers(view, following)
    match event:
        case events.TimePassed(open_requests):
            members = {a: m.with_failure_forgiven(now) for a, m in view.members.items()}
            return replace(view, members=members, open_requests=open_requests)
        case events.PlanStarting(epoch, addresses, group_size):
            started = replace(
                view,
                epoch=epoch,
                serving=addresses,
                group_size=group_size,
                recovering=view.recovering or view.phase is Phase.SERVING,
                replan=False,
                considered=frozenset(),
                postponed=frozenset(),
                unprepared="",
            )
            return _enter(_without_preparation(started), Phase.STARTING)
        case events.GroupMeasured(addresses, seconds):
            members = dict(view.members)
            for address in members.keys() & set(addresses):
                measured = {**members[address].collectives, frozenset(addresses): seconds}
                members[address] = replace(members[address], collectives=measured)
            return replace(view, members=members)
        case events.PlanServing(epoch) if epoch == view.epoch and view.phase is Phase.STARTING:
            served = replace(view, recovering=False, problem="", gathered=0.0, retry_at=0.0)
            return _enter(served, Phase.SERVING)
        case events.PlanFailed(epoch, reason, _, True) if epoch == view.epoch and _has_plan(view):
            return _end_plan(view, reason)
        case events.PlanFailed(epoch, reason, address) if epoch == view.epoch and _has_plan(view):
            return _with_failed_plan(view, reason, address)
        case events.PlanPreparing(workers):
            return replace(_without_preparation(view), preparing=workers, unprepared="")
        case events.PlanPrepared(workers) if view.preparing and workers == view.preparing:
            return replace(_without_preparation(view), prepared=workers)
        case events.PreparationFailed(workers, reason, address) if (
            view.preparing and workers == view.preparing
        ):
            return _with_failed_preparation(view, reason, address)
        case events.ReplanRequested():
            members = {a: replace(m, collectives={}) for a, m in view.members.items()}
            return replace(view, members=members, replan=_has_plan(view))
        case events.ModelChanged(why_not_alone):
            settings = replace(view.settings, why_not_alone=why_not_alone)
            ended = replace(_end_plan(view, ""), settings=settings, alone_problem="", replan=False)
            # The workers are known already, so this process does not wait for them before it serves alone.
            waited = 0.0 if ended.usable() else settings.wait
            return replace(ended, recovering=True, gathered=waited, since=now, retry_at=0.0)
        case events.PlanKept():
            kept = replace(view, replan=False, considered=view.candidate_ids(), unprepared="")
            return _without_preparation(kept)
        case events.PlanPostponed():
            return replace(view, postponed=view.candidate_ids())
        case events.GatheringFailed(reason):
            return _enter(replace(view, problem=reason, serving=()), Phase.ENDED)
        case events.GatheringRestarted():
            return _enter(replace(view, gathered=0.0, alone_problem=""), Phase.GATHERING)
        case _:
            return view  # an event of a plan that has been replaced


def _has_plan(view: View) -> bool:
    return view.phase in (Phase.STARTING, Phase.SERVING)


def _enter(view: View, phase: Phase) -> View:
    if view.phase is phase:
        return view
    return replace(view, gathered=view.waited, phase=phase, since=view.now)


# ---- members


def _with_member_event(view: View, event: events.MemberEvent) -> View:
    """Return the view with one worker updated by `event`."""
    described = (events.WorkerJoined, events.WorkerRefused)
    named = event.member if isinstance(event, described) else event
    address = named.address
    before = view.members.get(address)
    members = {a: m for a, m in view.members.items() if a != address}
    match event:
        case events.WorkerJoined(member):
            joined = replace(member, ready_since=view.now, joined_at=view.now)
            members[address] = joined.with_history_of(before)
        case events.WorkerRefused(member, reason):
            refused = replace(member, state=MemberState.REFUSED, reason=reason)
            members[address] = refused.with_history_of(before)
        case events.WorkerLost(_, reason) if before is not None:
            members[address] = before
            if before.state is not MemberState.LOST:
                lost = replace(before, state=MemberState.LOST, reason=reason)
                members[address] = lost.with_failure_recorded(view.now, FIRST_BACKOFF / 2)
        case events.WorkerDraining() if before is not None:
            members[address] = replace(before, state=MemberState.DRAINING)
    return replace(view, members=members)


# ---- plans that end


def _end_plan_without_its_workers(before: View, view: View) -> View:
    """Return `view`, with the plan ended if one of its workers is gone or was restarted since `before`."""
    for address in view.serving:
        was, member = before.members.get(address), view.members.get(address)
        if member is None or was is None or member.worker_id != was.worker_id:
            return _end_plan(view, f"the worker at {address} was replaced by another process")
        if member.state in (MemberState.LOST, MemberState.REFUSED):
            return _end_plan(view, f"{member.name}: {member.reason}")
    return view


def _with_failed_plan(view: View, reason: str, address: str | None) -> View:
    member = view.members.get(address) if address is not None else None
    if member is not None:
        # A plan that failed to start would fail again at once, so the worker backs off after its first failure.
        backoff = FIRST_BACKOFF if view.phase is Phase.STARTING else FIRST_BACKOFF / 2
        failed = member.with_failure_recorded(view.now, backoff)
        view = replace(view, members={**view.members, member.address: failed})
    elif not view.serving:
        view = replace(view, alone_problem=reason)
    elif view.phase is Phase.STARTING:
        view = replace(view, retry_at=view.now + RETRY_SECONDS)
    return _end_plan(view, reason)


def _without_preparation(view: View) -> View:
    return replace(view, preparing=frozenset(), prepared=frozenset())


def _with_failed_preparation(view: View, reason: str, address: str | None) -> View:
    """Record the failure of a live worker. Without one the same plan waits until workers change or a user asks."""
    considered = view.considered if address is not None else view.candidate_ids()
    replan = view.replan and address is not None
    retry_at = view.now + RETRY_SECONDS
    view = replace(view, unprepared=reason, considered=considered, replan=replan, retry_at=retry_at)
    view = _without_preparation(view)
    member = view.members.get(address) if address is not None else None
    if member is None or member.state is not MemberState.READY:
        return view
    failed = member.with_failure_recorded(view.now, FIRST_BACKOFF)
    return replace(view, members={**view.members, failed.address: failed})


def _end_plan(view: View, reason: str) -> View:
    served = view.phase is Phase.SERVING
    failed_at = view.now if served else view.failed_at
    recovering = view.recovering or served
    view = replace(view, serving=(), recovering=recovering, problem=reason, failed_at=failed_at)
    return _enter(_without_preparation(view), Phase.GATHERING)
