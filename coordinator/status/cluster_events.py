"""Events of a cluster for people, found by comparing two statuses: joins, losses, plans and recoveries."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from coordinator.status.cluster_status import ClusterStatus, NodeStatus

MAX_EVENTS = 100
"""Events kept for a page that opens later."""

Kind = Literal["join", "leave", "lost", "plan", "recovery", "problem"]


@dataclass(frozen=True)
class ClusterEvent:
    """One line about a change. `at` is seconds since 1970. `seconds` is the duration of a recovery."""

    at: float
    kind: Kind
    text: str
    seconds: float | None = None


class EventLog:
    """The last MAX_EVENTS events, oldest first."""

    def __init__(self) -> None:
        self.events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._before: ClusterStatus | None = None
        self._failed_at: float | None = None
        self._rebuilding_since: float | None = None
        """End of a recovery after which prompts are still computed again."""
        self._lost: list[str] = []

    def record_status(self, status: ClusterStatus, at: float) -> list[ClusterEvent]:
        """Compare `status` with the previous one and return the new events."""
        before, self._before = self._before, status
        if before is None:
            return []
        new = [
            *_node_events({n.address or "": n for n in before.nodes}, status, at),
            *self._plan_events(before, status, at),
            *self._rebuild_events(status, at),
        ]
        self.events.extend(new)
        return new

    def _plan_events(
        self, before: ClusterStatus, status: ClusterStatus, at: float
    ) -> list[ClusterEvent]:
        failed = status.recoveries > before.recoveries or (before.ready and not status.ready)
        if failed and self._failed_at is None:
            self._failed_at = at
            self._lost, self._rebuilding_since = [], None
        if self._failed_at is not None:
            lost = [n.name for n in status.nodes if n.health == "lost" and n.name not in self._lost]
            self._lost += lost
        if not status.ready or (status.epoch == before.epoch and before.ready):
            return []
        machines = sum(bool(node.span) for node in status.nodes)
        text = f"Plan {status.epoch} serves on {machines} machine{'s' * (machines != 1)}"
        if self._failed_at is None:
            return [ClusterEvent(at, "plan", text)]
        seconds, self._failed_at = at - self._failed_at, None
        cause = f"Recovered from the loss of {', '.join(self._lost)}" if self._lost else "Recovered"
        text = f"{cause}: plan {status.epoch} serves"
        self._rebuilding_since = at
        return [ClusterEvent(at, "recovery", text, seconds)]

    def _rebuild_events(self, status: ClusterStatus, at: float) -> list[ClusterEvent]:
        """Return an event when the answers of before a recovery are computed again."""
        since = self._rebuilding_since
        if since is None or status.prefilling or not status.ready or since == at:
            return []
        self._rebuilding_since = None
        if not status.running:
            return []
        answers = "1 answer goes" if status.running == 1 else f"{status.running} answers go"
        return [ClusterEvent(at, "recovery", f"{answers} on", at - since)]


def _node_events(
    before: dict[str, NodeStatus], status: ClusterStatus, at: float
) -> list[ClusterEvent]:
    events = []
    gone = dict(before)
    for node in status.nodes:
        old = gone.pop(node.address or "", None)
        if node.address is None:
            continue
        events += _node_event(old, node, at)
    events += [
        ClusterEvent(at, "leave", f"{node.name} left")
        for node in gone.values()
        if node.address is not None and node.health != "lost"
    ]
    return events


def _node_event(old: NodeStatus | None, node: NodeStatus, at: float) -> list[ClusterEvent]:
    detail = f": {node.detail}" if node.detail else ""
    health = None if old is None else old.health
    if node.health == health:
        return []
    match node.health:
        case "lost":
            return [ClusterEvent(at, "lost", f"{node.name} was lost{detail}")]
        case "refused":
            return [ClusterEvent(at, "problem", f"{node.name} was refused{detail}")]
        case "draining":
            return [ClusterEvent(at, "leave", f"{node.name} is leaving")]
        case _ if health in (None, "lost", "refused"):
            return [ClusterEvent(at, "join", f"{node.name} joined")]
        case _:
            return []
