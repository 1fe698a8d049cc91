"""One worker as the coordinator knows it, with its failure count. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from proto.span import Span

FIRST_BACKOFF = 2.0
"""Seconds. Shortest time for which no plan uses a worker that failed repeatedly."""

LONGEST_BACKOFF = 300.0
"""Seconds. Upper bound of the back-off, which doubles with each failure."""

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
    arithmetic: str = ""
    """Name of the machine's arithmetic. Machines with equal names give the same bits."""
    version: str = ""
    """Versions of the worker's programs, as it reports them."""

    def usable(self, now: float) -> bool:
        """Return whether a plan may use this worker at `now`."""
        return self.state is MemberState.READY and now >= self.backoff_until

    def with_history_of(self, before: Member | None) -> Member:
        """Return this member with the failures of `before`, the process that had its address.

        A restarted process inherits them, because the cause may be the machine.
        """
        if before is None:
            return self
        return replace(self, failure_count=before.failure_count, backoff_until=before.backoff_until)

    def with_failure_recorded(self, now: float, first_backoff: float) -> Member:
        """Return this member with one failure more.

        The back-off starts at `first_backoff` seconds and doubles with each failure. A back-off below FIRST_BACKOFF is
        skipped: after a single loss, the worker may return at once.
        """
        backoff = min(LONGEST_BACKOFF, first_backoff * 2**self.failure_count)
        until = now + backoff if backoff >= FIRST_BACKOFF else self.backoff_until
        return replace(self, failure_count=self.failure_count + 1, backoff_until=until)

    def with_failure_forgiven(self, now: float) -> Member:
        """Return this member with one failure less, if it was ready and usable for STABLE_SECONDS."""
        quiet = now - max(self.ready_since, self.backoff_until)
        if self.state is not MemberState.READY or not self.failure_count or quiet < STABLE_SECONDS:
            return self
        return replace(self, failure_count=self.failure_count - 1, ready_since=now)
