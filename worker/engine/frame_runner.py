"""The order of begin and finish of successive frames on the engine thread.

A frame that continues begins before the host has read the frame before it, so the device never waits for the host.
At most one frame is then unfinished, which bounds the memory of the work that is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from proto.frame import Frame
from proto.frame_stamps import FrameStamps
from worker.engine.deadline import DeadlineEstimate
from worker.engine.engine_thread import EngineThread
from worker.engine.memory import CacheTrimmer
from worker.engine.stage_engine import BegunFrame, StageEngine

PATIENCE = 0.5
"""Share of a frame's time to wait for a frame that continues it. The device is busy for the whole of that time."""

LONGEST_WAIT = 0.02
"""Seconds. Upper bound of that wait."""

OnDone = Callable[[Frame], None]
OnError = Callable[[Exception], None]


class FrameRunner:
    """The frames of one engine. All methods run on the engine thread."""

    def __init__(
        self, thread: EngineThread, deadlines: DeadlineEstimate, trimmer: CacheTrimmer
    ) -> None:
        self._thread = thread
        self._deadlines = deadlines
        self._trimmer = trimmer
        self._usual = 0.0
        """Seconds that the newest finished frame took."""

    def run(
        self,
        engine: StageEngine,
        frame: Frame,
        stamps: FrameStamps,
        on_done: OnDone,
        on_error: OnError,
    ) -> None:
        """Begin `frame`, and finish it now or when the frame that continues it has begun.

        Calls `on_done` with the frame for the next hop, or `on_error`.
        """
        if not (frame.continues and engine.can_run_ahead(frame)):
            self._thread.run_deferred()
        seconds = self._deadlines.seconds(frame)
        self._thread.expect(seconds)
        begun = _begin(engine, frame, stamps)
        del engine  # after a failure no thread may keep its weights in memory
        self._thread.run_deferred()
        if isinstance(begun, Exception):
            on_error(begun)
            return
        finish = partial(self._finish, begun, seconds, on_done, on_error)
        followed = frame.continues or self._thread.queued
        if followed and begun.engine.can_run_ahead(frame):
            self._thread.defer(finish, min(LONGEST_WAIT, PATIENCE * self._usual))
        else:
            finish()

    def _finish(
        self, begun: BegunFrame, seconds: float, on_done: OnDone, on_error: OnError
    ) -> None:
        try:
            self._thread.expect(seconds)
            out = begun.finish()
        except Exception as error:
            on_error(error)
            return
        on_done(out)
        self._usual = out.stage_us[-1] / 1e6
        self._deadlines.record_frame_time(out, self._usual)
        try:
            begun.clean_up()
        except Exception as error:
            on_error(error)
            return
        self._trimmer.record_frame(out)


def _begin(engine: StageEngine, frame: Frame, stamps: FrameStamps) -> BegunFrame | Exception:
    try:
        return engine.begin(frame, stamps)
    except Exception as error:
        return error
