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
"""Seconds no plan uses a worker from its second loss on: doubling with each, up to the longest."""

STABLE_SECONDS = 60.0
"""A worker that was ready so long has one of its losses forgotten."""

RETRY_SECONDS = 0.5
"""Pause after a plan that could not start, and nobody knows whose fault it is."""


class MemberState(Enum):
    """Where one worker stands."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"
    """It answers, but cannot serve: another checkpoint, another release, another coordinator's. `reason` says which."""


@dataclass(frozen=True)
class Member:
    """One worker, by its address. `worker_id` changes when its process does.

    `speed` is relative, as measured; `chip` says which machines are alike.
    """

    address: str
    worker_id: str
    name: str
    memory_limit: int
    speed: float = 1.0
    chip: str = ""
    pinned: Span | None = None
    whole: bool = True
    """Whether it has the checkpoint's files; one that has not is given its span before it loads."""
    state: MemberState = MemberState.READY
    reason: str = ""
    losses: int = 0
    """How often it was lost or to blame, less what time has mended."""
    held_until: float = 0.0
    """No plan uses it before: what fails again and again must not stop everyone's streams each time."""
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
    """What the user asked for, times in seconds.

    The first plan is made as soon as there are `nodes` workers, or when `wait` is over with those there are. `nodes`
    None waits, lest the first worker to be heard gets all layers. A plan after a failure is made at once from
    whatever is left; without one, this process serves alone after `wait` if it is `local` and can, and
    `recovery_wait` is the end of waiting.
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
    gathered: float = 0.0
    """Seconds spent waiting for a plan before the present phase, since one served or the waiting began anew."""
    retry_at: float = 0.0
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
    alone_problem: str = ""
    """Why this process could not serve alone when it tried."""

    def usable(self) -> list[Member]:
        """Workers a plan may use now, in a fixed order."""
        return sorted(
            (m for m in self.members.values() if m.usable(self.now)), key=lambda m: m.address
        )

    @property
    def waited(self) -> float:
        """Seconds without a plan that serves or starts."""
        return self.gathered + (self.now - self.since if self.phase is Phase.GATHERING else 0.0)


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
    """The plan in force, or being loaded, cannot serve. `address` is the worker to leave out, if one is known."""

    epoch: int
    reason: str
    address: str | None = None


@dataclass(frozen=True)
class ReplanAsked:
    """Someone wants the workers there are to be used as well as can be."""


@dataclass(frozen=True)
class Kept:
    """A new plan was asked for, and the one in force stays."""


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
    | Kept
    | Ended
    | Gathering
)


def apply(view: View, event: Event, now: float) -> View:
    """The view after `event`, which happened at `now`."""
    view = replace(view, now=now)
    match event:
        case Tick():
            return _mended(view)
        case Seen() | Refused() | Lost() | Draining() | Left():
            return _without_void_plan(view, _with_news(view, event))
        case Starting(epoch, addresses):
            started = replace(view, epoch=epoch, serving=addresses, replan=False)
            return _enter(started, Phase.STARTING)
        case Serving(epoch) if epoch == view.epoch and view.phase is Phase.STARTING:
            served = replace(view, recovering=False, problem="", gathered=0.0, retry_at=0.0)
            return _enter(served, Phase.SERVING)
        case PlanFailed(epoch, reason, address) if epoch == view.epoch and _planned(view):
            return _plan_failed(view, reason, address)
        case ReplanAsked():
            return replace(view, replan=_planned(view))
        case Kept():
            return replace(view, replan=False)
        case Ended(reason):
            return _enter(replace(view, problem=reason, serving=()), Phase.ENDED)
        case Gathering():
            return _enter(replace(view, gathered=0.0, alone_problem=""), Phase.GATHERING)
        case _:
            return view  # news of a plan that has been replaced


def _planned(view: View) -> bool:
    return view.phase in (Phase.STARTING, Phase.SERVING)


def _enter(view: View, phase: Phase) -> View:
    if view.phase is phase:
        return view
    return replace(view, gathered=view.waited, phase=phase, since=view.now)


# ---- members


def _with_news(view: View, event: Seen | Refused | Lost | Draining | Left) -> View:
    """The view with what is known of one worker brought up to date."""
    address = event.address if isinstance(event, Lost | Draining | Left) else event.member.address
    before = view.members.get(address)
    members = {a: m for a, m in view.members.items() if a != address}
    match event:
        case Seen(member):
            members[address] = replace(_with_history(member, before), ready_since=view.now)
        case Refused(member, reason):
            refused = replace(member, state=MemberState.REFUSED, reason=reason)
            members[address] = _with_history(refused, before)
        case Lost(_, reason) if before is not None:
            members[address] = before
            if before.state is not MemberState.LOST:
                lost = replace(before, state=MemberState.LOST, reason=reason)
                members[address] = _faulty(lost, view.now, FIRST_HOLD / 2)
        case Draining() if before is not None:
            members[address] = replace(before, state=MemberState.DRAINING)
    return replace(view, members=members)


def _with_history(member: Member, before: Member | None) -> Member:
    """What a worker did counts against the next process at its address too: it may be what kills them."""
    if before is None:
        return member
    return replace(member, losses=before.losses, held_until=before.held_until)


def _faulty(member: Member, now: float, first_hold: float) -> Member:
    """One loss more. Holds double with each; the first is `first_hold`, and one below FIRST_HOLD is none: who
    was lost once may return at once."""
    hold = min(LONGEST_HOLD, first_hold * 2**member.losses)
    until = now + hold if hold >= FIRST_HOLD else member.held_until
    return replace(member, losses=member.losses + 1, held_until=until)


def _mended(view: View) -> View:
    """Losses are forgotten one by one, while a worker is ready and not held."""

    def mended(member: Member) -> Member:
        quiet = view.now - max(member.ready_since, member.held_until)
        if member.state is not MemberState.READY or not member.losses or quiet < STABLE_SECONDS:
            return member
        return replace(member, losses=member.losses - 1, ready_since=view.now)

    return replace(view, members={a: mended(m) for a, m in view.members.items()})


# ---- plans that end


def _without_void_plan(before: View, view: View) -> View:
    """Give the plan up when one of its workers is gone, or is not the process it was."""
    for address in view.serving:
        was, member = before.members.get(address), view.members.get(address)
        if member is None or was is None or member.worker_id != was.worker_id:
            return _give_up_plan(view, f"the worker at {address} is another now")
        if member.state in (MemberState.LOST, MemberState.REFUSED):
            return _give_up_plan(view, f"{member.name}: {member.reason}")
    return view


def _plan_failed(view: View, reason: str, address: str | None) -> View:
    blamed = view.members.get(address) if address is not None else None
    if blamed is not None:
        starting = view.phase is Phase.STARTING  # a second try with it would fail as the first did
        faulty = _faulty(blamed, view.now, FIRST_HOLD if starting else FIRST_HOLD / 2)
        view = replace(view, members={**view.members, blamed.address: faulty})
    elif not view.serving:
        view = replace(view, alone_problem=reason)
    elif view.phase is Phase.STARTING:
        view = replace(view, retry_at=view.now + RETRY_SECONDS)
    return _give_up_plan(view, reason)


def _give_up_plan(view: View, reason: str) -> View:
    recovering = view.recovering or view.phase is Phase.SERVING
    view = replace(view, serving=(), recovering=recovering, problem=reason)
    return _enter(view, Phase.GATHERING)
