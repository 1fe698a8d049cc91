"""The cluster as the coordinator knows it: all that decisions are made from. Plain data.

`apply(view, event)` gives the next view; `decide(view)` says what to do about it; `manager` does that and
reports back by events. Times are seconds on the manager's clock, and arrive only in events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coordinator.cluster.member import Member


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
    whatever is left; without one, this process serves alone after `wait` unless `why_not_alone` says, for people, why it
    never can, and `recovery_wait` is the end of waiting.
    """

    nodes: int | None = None
    wait: float = 5.0
    recovery_wait: float = 30.0
    why_not_alone: str = ""


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
