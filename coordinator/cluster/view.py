"""The cluster as the coordinator knows it, and how events change it. Pure: no clock, no sockets.

`apply(view, event)` gives the next view; `decide.decide(view)` says what to do about it; `manager` does that and
reports back by events. Times are seconds on the manager's clock, and arrive only in events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from proto.span import Span

FIRST_HOLD = 2.0
LONGEST_HOLD = 300.0
"""Seconds a worker that was lost is held back when it returns: doubling with each loss, up to this."""

STABLE_SECONDS = 60.0
"""A worker that served so long without a fault has its losses forgotten."""


class MemberState(Enum):
    """Where one worker stands."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"
    """It answers, but cannot serve: another checkpoint, another release, another coordinator's. `reason` says which."""


@dataclass(frozen=True)
class Member:
    """One worker, by its address. `worker_id` changes when its process does."""

    address: str
    worker_id: str
    name: str
    memory_limit: int
    speed: float = 1.0
    pinned: Span | None = None
    state: MemberState = MemberState.READY
    reason: str = ""
    losses: int = 0
    held_until: float = 0.0
    ready_since: float = 0.0

    def usable(self, now: float) -> bool:
        return self.state is MemberState.READY and now >= self.held_until


class Phase(Enum):
    """What the coordinator is doing."""

    GATHERING = "waiting for workers"
    STARTING = "loading"
    SERVING = "serving"
    ENDED = "without a plan"


@dataclass(frozen=True)
class Settings:
    """What the user asked for. `wait` is for the first plan, `recovery_wait` for one after a failure, in seconds.

    `nodes` is how many workers to wait for; None takes those there are when `wait` is over, and at least one.
    `local` is whether this process may serve alone.
    """

    nodes: int | None = None
    wait: float = 5.0
    recovery_wait: float = 30.0
    local: bool = True


@dataclass(frozen=True)
class View:
    """Everything decisions are made from. `serving` are the addresses of the plan in force, in stage order; empty while
    there is none or this process serves alone."""

    settings: Settings
    now: float = 0.0
    since: float = 0.0
    """When the present phase began."""
    phase: Phase = Phase.GATHERING
    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    serving: tuple[str, ...] = ()
    recovering: bool = False
    """Whether a plan served before: the wait is another, and clients are waiting."""
    replan: bool = False
    """Whether someone asked for a new plan though the present one works."""
    problem: str = ""
    """Why the last attempt at a plan failed, for people."""

    def usable(self) -> list[Member]:
        """Workers a plan may use now, in a fixed order."""
        return sorted(
            (m for m in self.members.values() if m.usable(self.now)), key=lambda m: m.address
        )

    @property
    def waited(self) -> float:
        return self.now - self.since


# ---- events


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Seen:
    """A worker was described, and its signal stream is open."""

    member: Member


@dataclass(frozen=True)
class Refused:
    """A worker answers but cannot serve; `reason` is for people."""

    member: Member
    reason: str


@dataclass(frozen=True)
class Lost:
    """A worker fell silent, died, stalled, or its stage failed."""

    address: str
    reason: str


@dataclass(frozen=True)
class Draining:
    """A worker wants to leave."""

    address: str


@dataclass(frozen=True)
class Left:
    """A worker said goodbye, unused: forget it."""

    address: str


@dataclass(frozen=True)
class Starting:
    """A plan of `epoch` is being loaded; no addresses means this process alone."""

    epoch: int
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Serving:
    """The plan being loaded serves."""

    epoch: int


@dataclass(frozen=True)
class PlanFailed:
    """The plan in force, or being loaded, cannot serve. `address` is the worker to blame, if one is."""

    epoch: int
    reason: str
    address: str | None = None


@dataclass(frozen=True)
class ReplanAsked:
    """Someone wants the workers there are to be used as well as can be."""


@dataclass(frozen=True)
class Ended:
    """No plan could be had in the time there was."""

    reason: str


@dataclass(frozen=True)
class Gathering:
    """Someone waits for a plan again."""


Event = (
    Tick
    | Seen
    | Refused
    | Lost
    | Draining
    | Left
    | Starting
    | Serving
    | PlanFailed
    | ReplanAsked
    | Ended
    | Gathering
)


def apply(view: View, event: Event, now: float) -> View:
    """The view after `event`, which happened at `now`."""
    view = replace(view, now=now)
    match event:
        case Tick():
            return _forget_old_losses(view)
        case Seen(member):
            return _with_member(view, _returned(view, member))
        case Refused(member, reason):
            refused = replace(member, state=MemberState.REFUSED, reason=reason)
            return _with_member(view, _with_history(view, refused))
        case Lost(address, reason):
            return _lost(view, address, reason)
        case Draining(address):
            leaving = view.members.get(address)
            if leaving is None:
                return view
            return _with_member(view, replace(leaving, state=MemberState.DRAINING))
        case Left(address):
            members = {a: m for a, m in view.members.items() if a != address}
            return replace(view, members=members)
        case Starting(epoch, addresses):
            started = replace(view, epoch=epoch, serving=addresses, replan=False)
            return _enter(started, Phase.STARTING)
        case Serving(epoch) if epoch == view.epoch:
            return _enter(replace(view, recovering=False, problem=""), Phase.SERVING)
        case PlanFailed(epoch, reason, address) if epoch == view.epoch:
            return _plan_failed(view, reason, address)
        case ReplanAsked():
            return replace(view, replan=view.phase is Phase.SERVING)
        case Ended(reason):
            return _enter(replace(view, problem=reason, serving=()), Phase.ENDED)
        case Gathering():
            return _enter(view, Phase.GATHERING)
        case _:
            return view  # news of a plan that has been replaced


def _enter(view: View, phase: Phase) -> View:
    return view if view.phase is phase else replace(view, phase=phase, since=view.now)


def _with_member(view: View, member: Member) -> View:
    return replace(view, members={**view.members, member.address: member})


def _with_history(view: View, member: Member) -> Member:
    before = view.members.get(member.address)
    if before is None:
        return member
    return replace(member, losses=before.losses, held_until=before.held_until)


def _returned(view: View, member: Member) -> Member:
    """A worker that was lost comes back held, the longer the oftener it was lost."""
    member = replace(_with_history(view, member), ready_since=view.now)
    before = view.members.get(member.address)
    if before is None or before.state is not MemberState.LOST or before.losses < 2:
        return member
    hold = min(LONGEST_HOLD, FIRST_HOLD * 2 ** (before.losses - 2))
    return replace(member, held_until=view.now + hold)


def _lost(view: View, address: str, reason: str) -> View:
    member = view.members.get(address)
    if member is None or member.state is MemberState.LOST:
        return view
    lost = replace(member, state=MemberState.LOST, reason=reason, losses=member.losses + 1)
    view = _with_member(view, lost)
    in_use = address in view.serving and view.phase in (Phase.STARTING, Phase.SERVING)
    return _give_up_plan(view, f"{member.name}: {reason}") if in_use else view


def _plan_failed(view: View, reason: str, address: str | None) -> View:
    if view.phase not in (Phase.STARTING, Phase.SERVING):
        return view
    blamed = view.members.get(address) if address is not None else None
    if blamed is not None:
        view = _with_member(view, replace(blamed, held_until=view.now + FIRST_HOLD))
    return _give_up_plan(view, reason)


def _give_up_plan(view: View, reason: str) -> View:
    recovering = view.recovering or view.phase is Phase.SERVING
    view = replace(view, serving=(), recovering=recovering, problem=reason)
    return _enter(view, Phase.GATHERING)


def _forget_old_losses(view: View) -> View:
    members = {
        address: replace(m, losses=0)
        if m.losses
        and m.state is MemberState.READY
        and view.now - max(m.ready_since, m.held_until) > STABLE_SECONDS
        else m
        for address, m in view.members.items()
    }
    return replace(view, members=members)
