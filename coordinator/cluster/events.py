"""Events of a cluster: the only values that change the coordinator's view of it."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cluster.view import Member


class Event:
    """The base of all events."""


@dataclass(frozen=True)
class TimePassed(Event):
    """The clock moved on. `open_requests` answers are running or queued now."""

    open_requests: int = 0


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
class ReplanRequested(Event):
    """A user asked for the best plan over all workers that are there now."""


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
class GatheringFailed(Event):
    """No plan was possible before the deadline."""

    reason: str


@dataclass(frozen=True)
class GatheringRestarted(Event):
    """The generation loop waits for a plan again."""
