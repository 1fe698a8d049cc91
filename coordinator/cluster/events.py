"""Events of a cluster, the only values that change the view of it, and their effects. Pure: no clock, no sockets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.cluster.view import FIRST_BACKOFF, Member, MemberState, Phase, View


class Event:
    """The base of all events."""


@dataclass(frozen=True)
class TimePassed(Event):
    """The clock moved on. `open_requests` answers are running or queued now.

    With `handed_over` the next plan has to compute nothing of them again.
    """

    open_requests: int = 0
    handed_over: bool = False


@dataclass(frozen=True)
class WorkerJoined(Event):
    """A worker was described and its signal stream is open."""

    member: Member


@dataclass(frozen=True)
class WorkerRefused(Event):
    """A worker answers but cannot serve. `reason` is shown to people."""

    member: Member
    reason: str


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker fell silent, died or stalled, or its stage failed."""

    address: str
    reason: str


@dataclass(frozen=True)
class WorkerDraining(Event):
    """A worker asked to leave."""

    address: str


@dataclass(frozen=True)
class WorkerLeft(Event):
    """An unused worker left. It is removed from the view."""

    address: str


MemberEvent = WorkerJoined | WorkerRefused | WorkerLost | WorkerDraining | WorkerLeft


@dataclass(frozen=True)
class PlanStarting(Event):
    """The plan of `epoch` loads, with `group_size` workers a stage; without `addresses` in this process alone."""

    epoch: int
    addresses: tuple[str, ...]
    group_size: int = 1


@dataclass(frozen=True)
class PlanPreparing(Event):
    """The next plan is being prepared: those of `workers`, by id, that are new load beside the plan in force."""

    workers: frozenset[str]


@dataclass(frozen=True)
class PlanPrepared(Event):
    """The new ones of `workers` have loaded their stages of the next plan."""

    workers: frozenset[str]


@dataclass(frozen=True)
class PreparationFailed(Event):
    """The next plan over `workers` could not be prepared. `address` is the worker that failed, if known."""

    workers: frozenset[str]
    reason: str
    address: str | None = None


@dataclass(frozen=True)
class GroupMeasured(Event):
    """The members of a group at `addresses` have measured that a sum of one row takes `seconds`."""

    addresses: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class PlanServing(Event):
    """The plan that was being loaded serves."""

    epoch: int


@dataclass(frozen=True)
class PlanFailed(Event):
    """A plan cannot serve. `address` is the worker to leave out, if known. With `learned` no pause is needed."""

    epoch: int
    reason: str
    address: str | None = None
    learned: bool = False


@dataclass(frozen=True)
class ModelChanged(Event):
    """The cluster serves another model from now on. `why_not_alone` is set where it does not fit into this machine."""

    why_not_alone: str = ""


@dataclass(frozen=True)
class PlanKept(Event):
    """A new plan was considered, and the plan in force stays."""


@dataclass(frozen=True)
class PlanPostponed(Event):
    """A better plan exists. It starts once no answer is open."""


@dataclass(frozen=True)
class HandOverStarting(Event):
    """Open answers are being backed up. The plan changes at `until` at the latest."""

    until: float


@dataclass(frozen=True)
class GatheringFailed(Event):
    """No plan was possible before the deadline."""

    reason: str


@dataclass(frozen=True)
class GatheringRestarted(Event):
    """The generation loop waits for a plan again."""


FORGET_SECONDS = 3600.0
"""Seconds for which a lost or refused worker is shown after its last news. One that returns elsewhere replaces it."""

RETRY_SECONDS = 0.5
"""Seconds. Pause after a plan that could not start for a reason that no worker is known to have caused."""


def apply(view: View, event: Event, now: float) -> View:
    """Return the view after `event`, which happened at `now`."""
    view = replace(view, now=now)
    if isinstance(event, MemberEvent):
        following = _with_member_event(view, event)
        ready = {m.worker_id for m in following.members.values() if m.state is MemberState.READY}
        if not view.preparing | view.prepared <= ready:  # a worker may have lost its stage
            following = _without_preparation(following)
        return _end_plan_without_its_workers(view, following)
    match event:
        case TimePassed(open_requests, handed_over):
            members = {
                a: m.with_failure_forgiven(now)
                for a, m in view.members.items()
                if m.state not in (MemberState.LOST, MemberState.REFUSED) or now - m.lost_at < FORGET_SECONDS
            }
            return replace(view, members=members, open_requests=open_requests, handed_over=handed_over)
        case PlanStarting(epoch, addresses, group_size):
            started = replace(
                view,
                epoch=epoch,
                serving=addresses,
                group_size=group_size,
                recovering=view.recovering or view.phase is Phase.SERVING,
                considered=frozenset(),
                postponed=frozenset(),
            )
            return _enter(_without_preparation(started), Phase.STARTING)
        case GroupMeasured(addresses, seconds):
            members = dict(view.members)
            for address in members.keys() & set(addresses):
                measured = {**members[address].collectives, frozenset(addresses): seconds}
                members[address] = replace(members[address], collectives=measured)
            return replace(view, members=members)
        case PlanServing(epoch) if epoch == view.epoch and view.phase is Phase.STARTING:
            served = replace(view, recovering=False, problem="", gathered=0.0, retry_at=0.0)
            return _enter(served, Phase.SERVING)
        case PlanFailed(epoch, reason, _, True) if epoch == view.epoch and _has_plan(view):
            return _end_plan(view, reason)
        case PlanFailed(epoch, reason, address) if epoch == view.epoch and _has_plan(view):
            return _with_failed_plan(view, reason, address)
        case PlanPreparing(workers):
            return replace(_without_preparation(view), preparing=workers)
        case PlanPrepared(workers) if view.preparing and workers == view.preparing:
            return replace(_without_preparation(view), prepared=workers)
        case PreparationFailed(workers, reason, address) if view.preparing and workers == view.preparing:
            return _with_failed_preparation(view, reason, address)
        case ModelChanged(why_not_alone):
            settings = replace(view.settings, why_not_alone=why_not_alone)
            members = {a: replace(m, collectives={}) for a, m in view.members.items()}  # of rows of the former model
            ended = replace(_end_plan(view, ""), settings=settings, members=members, alone_problem="")
            # The workers are known already, so this process does not wait for them before it serves alone.
            waited = 0.0 if ended.usable() else settings.wait
            return replace(ended, recovering=True, gathered=waited, since=now, retry_at=0.0)
        case PlanKept():
            return _without_preparation(replace(view, considered=view.candidate_ids()))
        case PlanPostponed():
            return replace(view, postponed=view.candidate_ids())
        case HandOverStarting(until):
            return replace(view, hands_over_until=until, handed_over=False)
        case GatheringFailed(reason):
            return _enter(replace(view, problem=reason, serving=()), Phase.ENDED)
        case GatheringRestarted():
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


def _with_member_event(view: View, event: MemberEvent) -> View:
    """Return the view with one worker updated by `event`."""
    described = (WorkerJoined, WorkerRefused)
    named = event.member if isinstance(event, described) else event
    address = named.address
    before = view.members.get(address)
    members = {a: m for a, m in view.members.items() if a != address}
    match event:
        case WorkerJoined(member):
            joined = replace(member, ready_since=view.now, joined_at=view.now)
            gone = [a for a, m in members.items() if m.is_lost and m.name == member.name]
            for one in gone:  # the same machine at another address
                before = before or members[one]
                del members[one]
            members[address] = joined.with_history_of(before)
        case WorkerRefused(member, reason):
            refused = replace(member, state=MemberState.REFUSED, reason=reason, lost_at=view.now)
            members[address] = refused.with_history_of(before)
        case WorkerLost(_, reason) if before is not None:
            members[address] = before
            if before.state is not MemberState.LOST:
                lost = replace(before, state=MemberState.LOST, reason=reason, lost_at=view.now)
                members[address] = lost.with_failure_recorded(view.now, FIRST_BACKOFF / 2)
        case WorkerDraining() if before is not None:
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
    return replace(view, preparing=frozenset(), prepared=frozenset(), hands_over_until=None, handed_over=False)


def _with_failed_preparation(view: View, reason: str, address: str | None) -> View:
    """Record the failure of a live worker. Without one the same plan waits until workers change."""
    considered = view.considered if address is not None else view.candidate_ids()
    view = replace(view, considered=considered, retry_at=view.now + RETRY_SECONDS)
    view = _without_preparation(view)
    member = view.members.get(address) if address is not None else None
    if member is None or member.state is not MemberState.READY:
        return view
    failed = member.with_failure_recorded(view.now, FIRST_BACKOFF)
    return replace(view, members={**view.members, failed.address: failed})


def _end_plan(view: View, reason: str) -> View:
    recovering = view.recovering or view.phase is Phase.SERVING
    view = replace(view, serving=(), recovering=recovering, problem=reason)
    return _enter(_without_preparation(view), Phase.GATHERING)
