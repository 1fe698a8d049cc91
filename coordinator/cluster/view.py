"""The view of a cluster: its members, its settings and the plan in force. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from proto.span import Span

FIRST_BACKOFF = 2.0
"""Seconds. Shortest time for which no plan uses a worker that failed repeatedly."""

LONGEST_BACKOFF = 45.0
"""Seconds. Upper bound of the back-off, which doubles with each failure. A repaired worker serves within a minute."""

MOST_FAILURES = 6
"""Failures that are counted. The back-off is the longest from here on, and each of them takes a minute to forgive."""

STABLE_SECONDS = 60.0
"""Seconds a worker must stay ready before one of its failures is forgiven."""


class MemberState(Enum):
    """State of one worker as seen by the coordinator."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"
    """The worker answers but cannot serve. `Member.reason` names the cause."""


@dataclass(frozen=True)
class Member:
    """One worker, identified by its address. `worker_id` changes when its process is restarted.

    `speed` is relative to the reference bandwidth, as measured. Machines with equal `chip` are equally fast.
    """

    address: str
    worker_id: str
    name: str
    memory_limit: int
    speed: float = 1.0
    chip: str = ""
    pinned: Span | None = None
    has_files: bool = True
    """True if the worker has the checkpoint's files. Otherwise it receives its span before it loads."""
    state: MemberState = MemberState.READY
    reason: str = ""
    failure_count: int = 0
    """Recorded failures minus forgiven ones. A failure is a loss, or a plan that failed because of this worker."""
    backoff_until: float = 0.0
    """Manager's clock. No plan uses the worker earlier, so that one bad worker does not stop every stream again."""
    ready_since: float = 0.0
    joined_at: float = 0.0
    """Manager's clock. The process joined at this time."""
    lost_at: float = 0.0
    """Manager's clock, for a worker that is lost, or was refused last at this time."""
    arithmetic: str = ""
    """Name of the machine's arithmetic. Machines with equal names give the same bits."""
    version: str = ""
    """Versions of the worker's programs, as it reports them."""
    direct: str = ""
    """Host of the machine's direct link to other machines, over which a group may exchange partial results."""
    collectives: Mapping[frozenset[str], float] = field(default_factory=dict)
    """Measured seconds of a sum of one row, by the addresses of the group."""
    blocks: tuple[tuple[int, int, int], ...] = ()
    """First layer, end and bytes of the prefixes on the worker's disk when it joined."""

    @property
    def is_lost(self) -> bool:
        """True of a worker that fell silent or died, until it returns or is forgotten."""
        return self.state is MemberState.LOST

    def usable(self, now: float) -> bool:
        """Return whether a plan may use this worker at `now`."""
        return self.state is MemberState.READY and now >= self.backoff_until

    def with_history_of(self, before: Member | None) -> Member:
        """Return this member with the failures of `before`, the former process of a machine that may cause them."""
        if before is None:
            return self
        return replace(
            self,
            failure_count=before.failure_count,
            backoff_until=before.backoff_until,
            # Another process may have another link.
            collectives=before.collectives if before.worker_id == self.worker_id else {},
        )

    def with_failure_recorded(self, now: float, first_backoff: float) -> Member:
        """Return this member with one failure more. The back-off doubles, and is skipped below FIRST_BACKOFF."""
        backoff = min(LONGEST_BACKOFF, first_backoff * 2**self.failure_count)
        until = now + backoff if backoff >= FIRST_BACKOFF else self.backoff_until
        count = min(MOST_FAILURES, self.failure_count + 1)
        return replace(self, failure_count=count, backoff_until=until)

    def with_failure_forgiven(self, now: float) -> Member:
        """Return this member with one failure less, if it was ready and usable for STABLE_SECONDS."""
        quiet = now - max(self.ready_since, self.backoff_until)
        if self.state is not MemberState.READY or not self.failure_count or quiet < STABLE_SECONDS:
            return self
        return replace(self, failure_count=self.failure_count - 1, ready_since=now)


class Phase(Enum):
    """Current activity of the coordinator."""

    GATHERING = "waiting for workers"
    STARTING = "loading"
    SERVING = "serving"
    ENDED = "without a plan"


@dataclass(frozen=True)
class Settings:
    """User settings of the cluster. Times are in seconds.

    The first plan starts as soon as `nodes` workers are usable. Otherwise it starts after `wait`, with the workers that
    are there, or in this process alone. With `nodes_required` it needs `nodes` workers, and `first_wait` bounds the
    wait for them. `first_wait` also bounds the wait for a worker that can fill a gap between pinned layers.
    A plan after a failure starts at once with the workers that are left. Without any, this process serves alone after
    `wait`. `why_not_alone` is set where the model does not fit into this machine. `recovery_wait` bounds the recovery.
    """

    nodes: int | None = None
    nodes_required: bool = False
    wait: float = 5.0
    first_wait: float | None = None
    """None stands for `wait`."""
    recovery_wait: float = 30.0
    why_not_alone: str = ""


@dataclass(frozen=True)
class View:
    """State of the cluster at `now`. `serving` has the plan's addresses in stage order, and none for this process."""

    settings: Settings
    now: float = 0.0
    since: float = 0.0
    """Start of the present phase."""
    gathered: float = 0.0
    """Seconds spent waiting for a plan before the present phase, since a plan last served or the wait restarted."""
    retry_at: float = 0.0
    phase: Phase = Phase.GATHERING
    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    serving: tuple[str, ...] = ()
    group_size: int = 1
    """Workers that hold each stage of the plan in force together."""
    open_requests: int = 0
    recovering: bool = False
    """True if a plan served before. Clients may be waiting, so the waits differ from those of a start."""
    considered: frozenset[str] = frozenset()
    """Worker ids of the usable workers for which the present plan was found best."""
    postponed: frozenset[str] = frozenset()
    """Worker ids of the usable workers that a new plan will use once no answer is open."""
    preparing: frozenset[str] = frozenset()
    """Ids of the workers whose plan is being prepared: those that are new load beside the plan in force."""
    prepared: frozenset[str] = frozenset()
    """Ids of the workers whose plan is prepared, so that it may start."""
    hands_over_until: float | None = None
    """Manager's clock. The plan changes then, although answers could not be handed over; None if it does not change."""
    handed_over: bool = False
    """True once the next plan has to compute nothing of an open answer again."""
    problem: str = ""
    """Reason why the last attempt at a plan failed, for people."""
    alone_problem: str = ""
    """Reason why this process could not serve alone when it tried."""

    def usable(self) -> list[Member]:
        """Return the workers that a plan may use now, ordered by address."""
        return [member for member in self.ready() if member.usable(self.now)]

    def ready(self) -> list[Member]:
        """Return the workers that are alive and can serve, backing off or not, ordered by address."""
        alive = (m for m in self.members.values() if m.state is MemberState.READY)
        return sorted(alive, key=lambda m: m.address)

    def candidates(self) -> list[Member]:
        """Return the usable workers for the plan after the one in force.

        While a plan is prepared, and until it starts, other workers do not change it. Otherwise one that fails again
        and again would keep those that load from being used. A plan that is postponed may change.
        """
        usable, chosen = self.usable(), self.preparing or self.prepared
        found = [m for m in usable if m.worker_id in chosen]
        is_open = not chosen or chosen == self.postponed or len(found) < len(chosen)
        return usable if is_open else found

    def candidate_ids(self) -> frozenset[str]:
        """Return the ids of the candidates."""
        return frozenset(member.worker_id for member in self.candidates())

    @property
    def hands_over(self) -> bool:
        """True while open answers are backed up, before the plan changes."""
        until = self.hands_over_until
        return until is not None and self.open_requests > 0 and not self.handed_over and self.now < until

    @property
    def waited(self) -> float:
        """Seconds without a plan that serves or starts."""
        return self.gathered + (self.now - self.since if self.phase is Phase.GATHERING else 0.0)
