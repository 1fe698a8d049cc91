"""Figures of a running pipeline, from the frames that come back: speed, acceptance, stage times. Plain counters."""

from __future__ import annotations

from collections import deque

from coordinator.generation.in_flight import Settlement
from proto.frame import Frame

RATE_SECONDS = 10.0
"""Tokens a second are those of the last so many seconds."""

SMOOTHING = 0.1
"""Weight of the newest step in a stage's usual time."""


class Meter:
    """Counters since the start; times are the caller's, in seconds. `stage_ms` are those of a usual decode step."""

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.stage_ms: list[float] = []
        self._emitted: deque[tuple[float, int]] = deque()

    def observe(self, frame: Frame, settlement: Settlement, now: float) -> None:
        """Take a frame that has been through all stages, and what its return meant."""
        for number, right in settlement.judged:
            for counter in (self.drafted, self.accepted):
                counter.extend([0] * (number - len(counter)))
            self.drafted[number - 1] += 1
            self.accepted[number - 1] += right
        if settlement.tokens:
            self._forget(now)  # here too: nobody need ever ask for the rate
            self._emitted.append((now, settlement.tokens))
            if all(segment.open for segment in frame.segments):
                self._time(frame.stage_us)

    def _time(self, stage_us: tuple[int, ...]) -> None:
        if len(self.stage_ms) != len(stage_us):  # another plan
            self.stage_ms = [us / 1000 for us in stage_us]
        else:
            self.stage_ms = [
                old + SMOOTHING * (us / 1000 - old)
                for old, us in zip(self.stage_ms, stage_us, strict=True)
            ]

    def tokens_per_second(self, now: float) -> float:
        """Over the last RATE_SECONDS, or since the first token in them."""
        self._forget(now)
        if not self._emitted:
            return 0.0
        return sum(count for _, count in self._emitted) / max(now - self._emitted[0][0], 0.1)

    def _forget(self, now: float) -> None:
        while self._emitted and self._emitted[0][0] < now - RATE_SECONDS:
            self._emitted.popleft()
