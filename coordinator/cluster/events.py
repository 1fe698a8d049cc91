"""What can happen to a cluster: the only things that change what the coordinator knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cluster.member import Member


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
