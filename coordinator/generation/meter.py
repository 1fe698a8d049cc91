"""Counters of a running pipeline: tokens per second, acceptance and stage times."""

from __future__ import annotations

from collections import deque

from coordinator.generation.draft_counts import DraftCounts
from coordinator.generation.frame_outcome import FrameOutcome
from coordinator.generation.prefill_rate import PrefillRate
from proto.frame import Frame

RATE_SECONDS = 10.0
"""Seconds. Period over which tokens per second are averaged."""

SMOOTHING = 0.1
"""Weight of the newest step in the moving average of a stage's time."""


class Meter:
    """Counters since the start. The caller passes times in seconds. `stage_ms` is the average of decode steps."""

    def __init__(self) -> None:
        self.drafts = DraftCounts()
        self.prefill = PrefillRate()
        self.stage_ms: list[float] = []
        self._emitted: deque[tuple[float, int]] = deque()

    def record_frame(self, frame: Frame, outcome: FrameOutcome, now: float) -> None:
        """Count a returned frame and its outcome."""
        self.prefill.record_frame(frame)
        self.drafts.record_drafts(outcome.draft_results)
        if outcome.token_count:
            self._drop_old_tokens(now)  # the queue stays short even if no client asks for the rate
            self._emitted.append((now, outcome.token_count))
            if all(segment.open for segment in frame.segments):
                self._record_stage_times(frame.stage_us)

    def _record_stage_times(self, stage_us: tuple[int, ...]) -> None:
        if len(self.stage_ms) != len(stage_us):  # another plan
            self.stage_ms = [us / 1000 for us in stage_us]
        else:
            self.stage_ms = [
                old + SMOOTHING * (us / 1000 - old)
                for old, us in zip(self.stage_ms, stage_us, strict=True)
            ]

    def tokens_per_second(self, now: float) -> float:
        """Return the rate over the last RATE_SECONDS, or since the first token of that period."""
        self._drop_old_tokens(now)
        if not self._emitted:
            return 0.0
        return sum(count for _, count in self._emitted) / max(now - self._emitted[0][0], 0.1)

    def _drop_old_tokens(self, now: float) -> None:
        while self._emitted and self._emitted[0][0] < now - RATE_SECONDS:
            self._emitted.popleft()
