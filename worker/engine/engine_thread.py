"""The one thread of a worker that uses MLX. The event loop submits work and receives the results.

Signals run first, so that a rollback happens while frames that it makes stale are still queued. Frames and calls (load,
measure, report) keep their order. MLX 0.32.4 starts a thread of its own for each thread that computes, and never ends
it. So a process that loads a model again and again uses the same threads.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mtp.device import this_device
from worker.engine.hardware import compiler_runs

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Seconds that the end of the process waits for an idle thread."""

Work = Callable[[], None]

_idle: list[MlxThread] = []


class MlxThread:
    """A daemon thread that runs one engine after another."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Work, threading.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> threading.Event:
        """Run `work`, which may last as long as the process. The returned event is set at its end."""
        ended = threading.Event()
        self._work.put((work, ended))
        return ended

    def end(self) -> None:
        """End the thread, and wait for at most END_SECONDS."""
        self._work.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, ended = item
            try:
                work()
                _idle.append(self)
            except BaseException:  # its owner sees that it is not alive
                log.critical("the engine thread has ended", exc_info=True)
                return
            finally:
                ended.set()
            del item, work, ended  # an idle thread keeps no engine in memory
        # Without this, MLX's own threads may still run when the process ends, which sometimes aborts it.
        mx.clear_streams()


def run_on_mlx_thread(work: Work) -> threading.Event:
    """Run `work` on an idle thread, or on a new one. The returned event is set at its end."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = MlxThread()
    return thread.submit(work)


@atexit.register
def end_idle_threads() -> None:
    """End the threads that run no engine."""
    while _idle:
        _idle.pop().end()


T = TypeVar("T")


def run_into(future: asyncio.Future[T], function: Callable[[], T]) -> None:
    """Call `function` on this thread and set its result or its error on `future`, on the future's event loop."""
    try:
        result = function()
    except BaseException as error:
        post(future.get_loop(), _set_error, future, error)
    else:
        post(future.get_loop(), _set_result, future, result)


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call `function` on `loop` from another thread. A closed loop is ignored."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved, so that asyncio does not report it when no caller awaits it


USUAL_SECONDS = 1.0
"""Seconds. Deadline of a piece of work that sets no other."""

COMPILER_SECONDS = 60.0
"""Seconds. Longest work whose deadline moves because a compiler runs. A frame may need several new functions."""

IDLE_SECONDS = 1.0
"""Seconds without work after which the thread calls `on_idle`, once."""

CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for the present work. The thread is a daemon, so it does not hold up the process."""


class EngineThread:
    """A thread that runs one piece of work at a time. Construct it on the event loop that waits for its results."""

    def __init__(self) -> None:
        self.on_idle: Work = lambda: None
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called on the thread with an error that work did not report itself. It ends the plan."""
        self._loop = asyncio.get_running_loop()
        self._usual = max(USUAL_SECONDS, this_device().compile_seconds)
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._urgent: deque[Work] = deque()
        self._working_since: float | None = None
        self._due: float | None = None
        self._busy_us = 0
        self._deferred: Work | None = None
        self._patience = 0.0
        """Seconds to wait for other work before the deferred one runs."""
        self._ended = run_on_mlx_thread(self._run)

    # ---- from the event loop

    def submit(self, work: Work) -> None:
        """Queue work that reports its own result. Deferred work runs before it."""
        self._queue.put(partial(self._run_in_order, work))

    def submit_frame(self, work: Work) -> None:
        """Queue work that may run before deferred work. It calls `run_deferred` itself."""
        self._queue.put(work)

    def submit_urgent(self, work: Work) -> None:
        """Queue work that runs before everything queued by `submit`."""
        self._urgent.append(work)
        self._queue.put(lambda: None)  # wakes the thread if it sleeps

    async def call(self, function: Callable[[], T], *, urgent: bool = False) -> T:
        """Run `function` after the queued work, or before it, and return its result or raise its error."""
        future: asyncio.Future[T] = self._loop.create_future()

        def work() -> None:
            if future.cancelled():
                return  # the caller was cancelled
            run_into(future, function)

        if urgent:
            self.submit_urgent(partial(self._run_in_order, work))
        else:
            self.submit(work)
        return await future

    @property
    def alive(self) -> bool:
        """True while the thread runs, even after `close`."""
        return not self._ended.is_set()

    @property
    def queued(self) -> int:
        """Pieces of work in the queue."""
        return self._queue.qsize()

    @property
    def stall(self) -> float:
        """Seconds by which the present work exceeds its deadline; 0 before the deadline and without work."""
        due = self._due
        if due is None or self._working_since is None:
            return 0.0
        return max(0.0, time.monotonic() - due)

    def wait_for_compiler(self) -> None:
        """Move a deadline that has passed while MLX compiles a function, for at most COMPILER_SECONDS of work."""
        since = self._working_since
        if since is None or self.stall == 0 or time.monotonic() - since > COMPILER_SECONDS:
            return
        if compiler_runs() and self._working_since == since:
            self.expect(USUAL_SECONDS)

    @property
    def busy_us(self) -> int:
        """Microseconds of work since the start, the present work included."""
        since = self._working_since
        return self._busy_us + (0 if since is None else int((time.monotonic() - since) * 1e6))

    async def close(self) -> None:
        """End after the present work, or give up waiting after CLOSE_SECONDS."""
        self._queue.put(None)
        await asyncio.to_thread(self._ended.wait, CLOSE_SECONDS)

    # ---- on the thread

    def expect(self, seconds: float) -> None:
        """Set the deadline of the present work, or of its next part, to `seconds` from now."""
        self._due = time.monotonic() + seconds

    def post(self, function: Callable[..., None], *args: object) -> None:
        """Call `function` on the event loop, from this thread."""
        post(self._loop, function, *args)

    def defer(self, work: Work, seconds: float) -> None:
        """Run `work` later: at `run_deferred`, or when no other work comes within `seconds`. Only one may wait."""
        assert self._deferred is None, "the deferred work has not run"
        self._deferred, self._patience = work, seconds

    def run_deferred(self, before: Work = lambda: None) -> None:
        """Run the deferred work now, if there is any, after `before`."""
        work, self._deferred = self._deferred, None
        if work is not None:
            before()
            work()

    def _run_in_order(self, work: Work) -> None:
        self.run_deferred()
        work()

    def _next_work(self) -> Work | None:
        """Wait for the next work, or the deferred one. Call `on_idle` once if none comes within IDLE_SECONDS."""
        if self._deferred is not None:
            try:
                return self._queue.get(timeout=self._patience)
            except queue.Empty:
                return self.run_deferred
        try:
            return self._queue.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            self._attempt(self.on_idle)
            return self._queue.get()

    def _attempt(self, work: Work) -> None:
        """Run `work`. An error in it is no reason to end the thread, which the next plan needs."""
        try:
            work()
        except Exception as error:
            log.exception("work on the engine thread failed")
            self.on_failure(error)

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            started = self._working_since = time.monotonic()
            self.expect(self._usual)
            while self._urgent:
                self._attempt(self._urgent.popleft())
            self._attempt(work)
            self._due = self._working_since = None
            self._busy_us += int((time.monotonic() - started) * 1e6)
