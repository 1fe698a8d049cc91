"""Ten minutes of figures of a cluster, one sample a second."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass

from coordinator.status.cluster_status import ClusterStatus
from coordinator.status.latency import LatencyLog, percentile

SAMPLE_SECONDS = 1.0
"""Seconds. Time between two samples: short enough to show a recovery, which takes seconds."""

MAX_SAMPLES = 600
"""Samples. Ten minutes."""


@dataclass(frozen=True)
class Sample:
    """The figures of one second. `at` is seconds since 1970. `acceptance` is None in a second without drafts.

    Latencies are in seconds. `first_token_50` and `first_token_95` cover the last ten minutes, `gap_50` and `gap_95`
    this second.
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
        tokens, drafted, accepted = (
            self._latency.tokens,
            sum(status.drafted_by_position),
            sum(status.accepted_by_position),
        )
        new_tokens, new_drafted = tokens - self._tokens, drafted - self._drafted
        new_accepted = accepted - self._accepted
        self._tokens, self._drafted, self._accepted = tokens, drafted, accepted
        if before is None:
            return None
        first = self._latency.first_tokens(now)
        gaps = self._latency.take_gaps()
        sample = Sample(
            at,
            new_tokens / (now - before),
            new_accepted / new_drafted if new_drafted > 0 else None,
            status.running,
            status.waiting,
            percentile(first, 0.5),
            percentile(first, 0.95),
            percentile(gaps, 0.5),
            percentile(gaps, 0.95),
        )
        self.samples.append(sample)
        return sample
