"""The exact times of frames for the timeline, read from the traces of all processes while a page is open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from coordinator.frame_trace.process_trace import COORDINATOR, ProcessTrace
from coordinator.status.bottleneck import MeasuredPass, PassLog
from coordinator.status.frame_history import FrameHistory, FrameKey, StageSpans
from proto.errors import ClusterError
from proto.frame_stamps import StageStep

log = logging.getLogger(__name__)

TRACE_SECONDS = 1.0
"""Seconds between two collections: short enough for a live picture, and one call a second to each worker."""

DEADLINE_SECONDS = 1.0
"""Seconds. Bounds one collection. Frames without it keep their estimated times."""

MARGIN_SECONDS = 0.05
"""Seconds. A frame reaches its first stage after it was sent, but clocks of machines differ a little."""

CollectTraces = Callable[[float], Awaitable[list[ProcessTrace]]]
"""A function that returns the traces of all processes over the last seconds."""


class LiveTrace:
    """Places the frames of `frames` at the times that the stages' own clocks measured."""

    def __init__(self, frames: FrameHistory, collect: CollectTraces) -> None:
        self.passes = PassLog()
        self._frames = frames
        self._collect = collect

    async def update_frames(self, after: int) -> None:
        """Collect the traces once if frames after number `after` lack their exact times."""
        waiting = self._frames.estimated_since(after)
        if not waiting:
            return
        seconds = time.monotonic() - min(frame.sent_at for frame in waiting) + MARGIN_SECONDS
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                processes = await self._collect(seconds)
        except (ClusterError, TimeoutError) as error:  # the plan changes, or a worker is lost
            log.debug("no trace", extra={"error": str(error)})
            return
        exact = stage_spans(processes)
        for frame in waiting:
            if (stages := exact.get(frame.key)) and len(stages) == len(frame.stages):
                self._frames.place_frame(frame.number, stages)
                self.passes.record_pass(MeasuredPass(frame.sent_at, frame.returned_at, stages))


def stage_spans(processes: Sequence[ProcessTrace]) -> dict[FrameKey, StageSpans]:
    """Return the start and end of each stage's work, in seconds, of the frames that all stages have finished."""
    stages = sorted(
        (process for process in processes if process.stage != COORDINATOR),
        key=lambda process: process.stage,
    )
    found: dict[FrameKey, list[tuple[float, float]]] = {}
    for place, process in enumerate(stages):
        for frame in process.frames:
            start, end = frame.times[StageStep.STARTED], frame.times[StageStep.ENCODED]
            spans = found.setdefault((frame.epoch, frame.number), [])
            if start and end and len(spans) == place:
                spans.append((start / 1e9, end / 1e9))
    return {key: tuple(spans) for key, spans in found.items() if len(spans) == len(stages)}
