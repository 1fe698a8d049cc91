"""The past of a cluster: latencies, requests, ten minutes of samples, and events that people read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Literal

from coordinator.status.cluster_status import ClusterStatus, NodeStatus

KEPT_SECONDS = 600.0
"""Seconds. Times to the first token count in percentiles for this long."""

MAX_FIRST_TOKENS = 2000
"""Bounds the memory of a server with many short requests: three requests a second for ten minutes."""

MAX_GAPS = 4096
"""Bounds the gaps between two samples: 16 streams with 50 windows a second for 5 seconds."""


class LatencyLog:
    """Latencies in seconds, and the number of tokens delivered since the start. The caller passes the time."""

    def __init__(self) -> None:
        self.tokens = 0
        self.answers: deque[tuple[float, float]] = deque(maxlen=MAX_FIRST_TOKENS)
        """The time of the first token of each answer, and the seconds to it."""
        self.gaps: deque[float] = deque(maxlen=MAX_GAPS)
        """Seconds between two deliveries to one client."""

    def first_tokens(self, now: float) -> list[float]:
        """Return the times to the first token of the last KEPT_SECONDS."""
        while self.answers and self.answers[0][0] < now - KEPT_SECONDS:
            self.answers.popleft()
        return [seconds for _, seconds in self.answers]


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the value below which `share` of `values` lie (nearest rank), or None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


MAX_RECENT = 50
"""Ended requests kept for a page that opens later."""

MAX_SHOWN = 50
"""Open requests that a message to pages lists. More would not fit on a screen."""


@dataclass
class RequestRecord:
    """One request, open while `seconds` is None and `outcome` empty. Times are seconds, `began_at` since 1970.

    `client` names the program and its key or address. `id` is that of the answer, empty until its prompt is read.
    `prompt_done` of `prompt_tokens` are computed or cached.
    """

    number: int
    endpoint: str
    began_at: float
    client: str = ""
    id: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    prompt_done: int = 0
    cached_tokens: int = 0
    first_token: float | None = None
    seconds: float | None = None
    outcome: str = ""


class RequestLog:
    """The open requests and the last MAX_RECENT ended ones. `ended` counts all ended requests since the start."""

    def __init__(self) -> None:
        self.recent: deque[RequestRecord] = deque(maxlen=MAX_RECENT)
        self.ended = 0
        self.stops: dict[str, Callable[[], None]] = {}
        """The functions that stop open requests, by the id of the answer."""
        self._begun = 0
        self._open: dict[int, RequestRecord] = {}

    def begin_request(self, endpoint: str, at: float, client: str = "") -> RequestRecord:
        """Add an open request."""
        self._begun += 1
        record = self._open[self._begun] = RequestRecord(self._begun, endpoint, round(at, 2), client)
        return record

    def end_request(self, record: RequestRecord, outcome: str, seconds: float) -> None:
        """Move a request to the ended ones."""
        record.outcome, record.seconds = outcome, round(seconds, 3)
        del self._open[record.number]
        self.stops.pop(record.id, None)
        self.recent.append(record)
        self.ended += 1

    def open_requests(self) -> list[RequestRecord]:
        """Return the oldest MAX_SHOWN open requests."""
        return list(islice(self._open.values(), MAX_SHOWN))

    def ended_since(self, count: int) -> Iterable[RequestRecord]:
        """Return the requests that ended after the first `count`, as far as they are kept."""
        new = min(self.ended - count, len(self.recent))
        return [self.recent[i] for i in range(len(self.recent) - new, len(self.recent))]


SAMPLE_SECONDS = 1.0
"""Seconds. Time between two samples: short enough to show a recovery, which takes seconds."""

MAX_SAMPLES = 600
"""Samples. Ten minutes."""


@dataclass(frozen=True)
class Sample:
    """The figures of one second. `at` is seconds since 1970. `acceptance` is None in a second without drafts.

    Latencies are in seconds, those of the first token over ten minutes, gaps over this second.
    """

    at: float
    tokens_per_second: float
    acceptance: float | None
    running: int
    waiting: int
    first_token_50: float | None
    first_token_95: float | None
    gap_50: float | None
    gap_95: float | None

    def compact(self) -> list[float | int | None]:
        """Return the fields in order, with four digits after the point."""
        return [round(v, 4) if isinstance(v, float) else v for v in astuple(self)]


class History:
    """The samples, oldest first. The caller passes times: `at` since 1970, `now` in the clock of `latency`."""

    def __init__(self, latency: LatencyLog) -> None:
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._latency = latency
        self._tokens = 0
        self._drafted = 0
        self._accepted = 0
        self._sampled_at: float | None = None

    def record_status(self, status: ClusterStatus, at: float, now: float) -> Sample | None:
        """Return a new sample if SAMPLE_SECONDS have passed since the last one. The first call returns none."""
        if self._sampled_at is not None and now - self._sampled_at < SAMPLE_SECONDS:
            return None
        before, self._sampled_at = self._sampled_at, now
        tokens = self._latency.tokens
        drafted, accepted = sum(status.drafted_by_position), sum(status.accepted_by_position)
        new_tokens, new_drafted = tokens - self._tokens, drafted - self._drafted
        new_accepted = accepted - self._accepted
        self._tokens, self._drafted, self._accepted = tokens, drafted, accepted
        if before is None:
            return None
        first = self._latency.first_tokens(now)
        gaps = list(self._latency.gaps)
        rate = new_tokens / (now - before)
        share = new_accepted / new_drafted if 0 <= new_accepted <= new_drafted > 0 else None
        latencies = [percentile(times, part) for times in (first, gaps) for part in (0.5, 0.95)]
        self._latency.gaps.clear()
        sample = Sample(at, rate, share, status.running, status.waiting, *latencies)
        self.samples.append(sample)
        return sample


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
        self._lost: list[str] = []

    def record_status(self, status: ClusterStatus, at: float) -> list[ClusterEvent]:
        """Compare `status` with the previous one and return the new events."""
        before, self._before = self._before, status
        if before is None:
            return []
        new = _node_events({n.address or "": n for n in before.nodes}, status, at)
        new += self._plan_events(before, status, at)
        self.events.extend(new)
        return new

    def _plan_events(self, before: ClusterStatus, status: ClusterStatus, at: float) -> list[ClusterEvent]:
        if status.recoveries > before.recoveries and self._failed_at is None:
            self._failed_at = at
            self._lost = []
        if self._failed_at is not None:
            lost = (n.name for n in status.nodes if n.health == "lost")
            self._lost += [name for name in lost if name not in self._lost]
        if not status.ready or (status.epoch == before.epoch and before.ready):
            return []
        machines = sum(bool(node.span) for node in status.nodes)
        serves = "1 machine serves" if machines == 1 else f"{machines} machines serve"
        if self._failed_at is None:
            return [ClusterEvent(at, "plan", serves)]
        seconds, self._failed_at = at - self._failed_at, None
        cause = f"Recovered from the loss of {', '.join(self._lost)}" if self._lost else "Recovered"
        return [ClusterEvent(at, "recovery", f"{cause}: {serves}", seconds)]


def _node_events(before: dict[str, NodeStatus], status: ClusterStatus, at: float) -> list[ClusterEvent]:
    present = (node for node in status.nodes if node.address is not None)
    found = [e for n in present for e in _node_event(before.pop(n.address or "", None), n, at)]
    gone = (node for node in before.values() if node.address is not None)
    return found + [ClusterEvent(at, "leave", f"{n.name} left") for n in gone if n.health != "lost"]


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
