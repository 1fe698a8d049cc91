"""What can happen to a cluster: the only things that change what the coordinator knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cluster.member import Member


@dataclass(frozen=True)
class TimePassed:
    """Time passed."""


@dataclass(frozen=True)
class WorkerJoined:
    """A worker was described, and its signal stream is open."""

    member: Member


@dataclass(frozen=True)
class WorkerRefused:
    """A worker answers but cannot serve; `reason` is for people."""

    member: Member
    reason: str


@dataclass(frozen=True)
class WorkerLost:
    """A worker fell silent, died, stalled, or its stage failed."""

    address: str
    reason: str


@dataclass(frozen=True)
class WorkerDraining:
    """A worker wants to leave."""

    address: str


@dataclass(frozen=True)
class WorkerLeft:
    """A worker said goodbye, unused: forget it."""

    address: str


@dataclass(frozen=True)
class PlanStarting:
    """A plan of `epoch` is being loaded; no addresses means this process alone."""

    epoch: int
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class PlanServing:
    """The plan being loaded serves."""

    epoch: int


@dataclass(frozen=True)
class PlanFailed:
    """The plan in force, or being loaded, cannot serve. `address` is the worker to leave out, if one is known."""

    epoch: int
    reason: str
    address: str | None = None


@dataclass(frozen=True)
class ReplanRequested:
    """Someone wants the workers there are to be used as well as can be."""


@dataclass(frozen=True)
class PlanKept:
    """A new plan was asked for, and the one in force stays."""


@dataclass(frozen=True)
class GatheringFailed:
    """No plan could be had in the time there was."""

    reason: str


@dataclass(frozen=True)
class GatheringRestarted:
    """Someone waits for a plan again."""


Event = (
    TimePassed
    | WorkerJoined
    | WorkerRefused
    | WorkerLost
    | WorkerDraining
    | WorkerLeft
    | PlanStarting
    | PlanServing
    | PlanFailed
    | ReplanRequested
    | PlanKept
    | GatheringFailed
    | GatheringRestarted
)
