"""The timeline's exact times: estimates are replaced by what the stages measured, while a page is open."""

from __future__ import annotations

import asyncio
import json
import time

from coordinator.frame_trace.process_trace import (
    COORDINATOR,
    ClockOffset,
    FrameTimes,
    ProcessTrace,
)
from coordinator.status.cluster_status import ClusterStatus
from coordinator.status.frame_history import FrameHistory
from coordinator.status.latency import LatencyLog
from coordinator.web.live_feed import HOLD_SECONDS, LiveFeed
from coordinator.web.live_trace import LiveTrace
from proto.errors import WorkerLostError
from proto.frame_stamps import StageStep


class Pipeline:
    """Two stages that measured frames, and a status source without news."""

    def __init__(self) -> None:
        self.history = FrameHistory()
        self.processes: list[ProcessTrace] = []
        self.asked: list[float] = []
        self.lost = False

    def status(self) -> ClusterStatus:
        """See StatusSource."""
        return ClusterStatus(ready=True, model="tiny")

    async def collect(self, seconds: float) -> list[ProcessTrace]:
        """Return the traces. Raises WorkerLostError if a stage is lost."""
        self.asked.append(seconds)
        if self.lost:
            raise WorkerLostError("stage 1 is lost")
        return self.processes

    def run_frame(self, number: int, sent_at: float, *starts: float, stages: int = 2) -> None:
        """Return one frame whose stages began `starts` after it was sent, and took 10 ms each."""
        sent = self.history.record_frame
        sent("decode", 1, 0, (10_000,) * stages, sent_at, sent_at + 0.1, (1, number))
        for stage, start in enumerate(starts):
            times = [0] * len(StageStep)
            times[StageStep.STARTED] = int((sent_at + start) * 1e9)
            times[StageStep.ENCODED] = int((sent_at + start + 0.01) * 1e9)
            trace = FrameTimes(1, number, 1, tuple(times))
            while len(self.processes) <= stage + 1:
                place = len(self.processes) - 1
                self.processes.append(ProcessTrace("", max(place, COORDINATOR), ClockOffset(), ()))
            old = self.processes[stage + 1]
            self.processes[stage + 1] = ProcessTrace("", stage, old.clock, (*old.frames, trace))


async def test_frames_get_the_times_that_their_stages_measured() -> None:
    """Only frames that a page lacks are looked up, as far back as the oldest of them was sent."""
    pipeline = Pipeline()
    live = LiveTrace(pipeline.history, pipeline.collect)
    await live.update_frames(0)
    assert pipeline.asked == []
    now = time.monotonic()
    pipeline.run_frame(1, now - 3, 0.02, 0.05)
    pipeline.run_frame(2, now - 1, 0.03)  # the second stage has not reported it
    await live.update_frames(0)
    first, second = pipeline.history.frames
    assert first.exact
    assert [round(start - first.sent_at, 6) for start, _ in first.stages] == [0.02, 0.05]
    assert not second.exact
    assert 3 < pipeline.asked[0] < 4
    await live.update_frames(1)
    assert 1 < pipeline.asked[1] < 2


async def test_a_lost_worker_leaves_the_estimates() -> None:
    """After a short wait a page gets the frames without reported times, marked as estimates."""
    pipeline = Pipeline()
    pipeline.lost = True
    feed = LiveFeed(pipeline, LatencyLog(), frames=pipeline.history)
    feed.start = lambda: None  # type: ignore[method-assign]
    feed.trace = LiveTrace(pipeline.history, pipeline.collect)
    stream = feed.subscribe()
    async with asyncio.timeout(20):
        await anext(stream)
        feed.publish_changes()
        now = time.monotonic()
        pipeline.run_frame(1, now - HOLD_SECONDS - 1, 0.02, 0.05)
        pipeline.run_frame(2, now, 0.02, 0.05)
        await feed.trace.update_frames(0)
        feed.publish_changes()
        message = (await anext(stream)).decode()
        delta = json.loads(message.splitlines()[1].removeprefix("data: "))
        assert [frame[:2] for frame in delta["frames"]] == [[1, "d~"]]
        pipeline.lost = False
        await feed.trace.update_frames(1)
        feed.publish_changes()
        message = (await anext(stream)).decode()
    delta = json.loads(message.splitlines()[1].removeprefix("data: "))
    assert [frame[:2] for frame in delta["frames"]] == [[2, "d"]]
    await stream.aclose()
