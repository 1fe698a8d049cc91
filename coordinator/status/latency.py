"""Recent latencies of requests: time to the first token and time between deliveries, with their percentiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

KEPT_SECONDS = 600.0
"""Seconds. Times to the first token count in percentiles for this long."""

MAX_FIRST_TOKENS = 2000
"""Bounds the memory of a server with many short requests: three requests a second for ten minutes."""

MAX_GAPS = 4096
"""Bounds the gaps between two calls of `take_gaps`: 16 streams with 50 windows a second for 5 seconds."""


class LatencyLog:
    """Latencies in seconds, and the number of tokens delivered since the start. The caller passes the time."""

    def __init__(self) -> None:
        self.tokens = 0
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_FIRST_TOKENS)
        self._gaps: deque[float] = deque(maxlen=MAX_GAPS)

    def record_first_token(self, now: float, seconds: float) -> None:
        """Record the time to the first token of an answer."""
        self._first_tokens.append((now, seconds))

    def record_gap(self, seconds: float) -> None:
        """Record the time between two deliveries to one client."""
        self._gaps.append(seconds)

    def first_tokens(self, now: float) -> list[float]:
        """Return the times to the first token of the last KEPT_SECONDS."""
        while self._first_tokens and self._first_tokens[0][0] < now - KEPT_SECONDS:
            self._first_tokens.popleft()
        return [seconds for _, seconds in self._first_tokens]

    def take_gaps(self) -> list[float]:
        """Return the gaps since the last call."""
        gaps = list(self._gaps)
        self._gaps.clear()
        return gaps


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the value below which `share` of `values` lie (nearest rank), or None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
