"""What a running cluster says of itself: `/status`, the gauges of `/metrics`, the table of `mtp-coord status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Health = Literal["ready", "loading", "idle", "draining", "refused", "lost"]


@dataclass(frozen=True)
class NodeStatus:
    """One machine. `span` is as people write it, `0-31`; None while it holds no layers.

    `detail` is one line for people: why it is not used. `address` is None for a stage in the coordinator's own
    process. Memory is in bytes. `loaded` is the part of its weights a loading node has, 0 to 1. `stage_ms` is the
    usual time of one decode step of its stage.
    """

    name: str
    address: str | None = None
    span: str | None = None
    health: Health = "idle"
    detail: str = ""
    memory_used: int = 0
    memory_limit: int | None = None
    loaded: float | None = None
    stage_ms: float | None = None


@dataclass(frozen=True)
class PrefillStatus:
    """A prompt on its way in: `done` of `total` tokens."""

    request_id: str
    done: int
    total: int


@dataclass(frozen=True)
class ClusterStatus:
    """The cluster at one moment. Counts by draft position and of tokens are since the start, never smaller.

    `detail` is one line for people: why it is not ready, or what it is doing about a lost worker.
    A limit of None is no limit.
    """

    ready: bool
    model: str
    detail: str = ""
    epoch: int = 0
    mtp: str = "off"
    nodes: tuple[NodeStatus, ...] = ()
    running: int = 0
    running_limit: int | None = None
    waiting: int = 0
    waiting_limit: int | None = None
    kv_tokens: int = 0
    kv_limit: int | None = None
    tokens_per_second: float = 0.0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    prefilling: tuple[PrefillStatus, ...] = ()
    recoveries: int = 0
    uptime_seconds: float = 0.0

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """Part of the drafts at each position that was kept; None where there were none."""
        pairs = zip(self.drafted_by_position, self.accepted_by_position, strict=True)
        return tuple(kept / drafted if drafted else None for drafted, kept in pairs)


class StatusSource(Protocol):
    """Whoever knows. The server's composition root gives the real one."""

    def status(self) -> ClusterStatus:
        """A snapshot. Called on the event loop: takes no lock and waits for nothing."""
        ...
