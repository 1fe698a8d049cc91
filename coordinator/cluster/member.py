"""One worker as the coordinator knows it, and how often it has failed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from proto.span import Span

FIRST_BACKOFF = 2.0
LONGEST_BACKOFF = 300.0
"""Seconds no plan uses a worker from its second loss on: doubling with each, up to the longest."""

STABLE_SECONDS = 60.0
"""A worker that was ready so long has one of its losses forgotten."""


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
    failure_count: int = 0
    """How often it was lost or to blame, less what time has mended."""
    backoff_until: float = 0.0
    """No plan uses it before: what fails again and again must not stop everyone's streams each time."""
    ready_since: float = 0.0

    def usable(self, now: float) -> bool:
        return self.state is MemberState.READY and now >= self.backoff_until

    def with_history_of(self, before: Member | None) -> Member:
        """What a worker did counts against the next process at its address too: it may be what kills them."""
        if before is None:
            return self
        return replace(self, failure_count=before.failure_count, backoff_until=before.backoff_until)

    def with_failure_recorded(self, now: float, first_hold: float) -> Member:
        """One loss more. Holds double with each; the first is `first_hold`, and one below FIRST_HOLD is none: who
        was lost once may return at once."""
        hold = min(LONGEST_BACKOFF, first_hold * 2**self.failure_count)
        until = now + hold if hold >= FIRST_BACKOFF else self.backoff_until
        return replace(self, failure_count=self.failure_count + 1, backoff_until=until)

    def with_failure_forgiven(self, now: float) -> Member:
        """Losses are forgotten one by one, while it is ready and not held."""
        quiet = now - max(self.ready_since, self.backoff_until)
        if self.state is not MemberState.READY or not self.failure_count or quiet < STABLE_SECONDS:
            return self
        return replace(self, failure_count=self.failure_count - 1, ready_since=now)
