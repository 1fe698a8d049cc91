"""The system's threads that use MLX, kept for the next engine of the process.

MLX 0.32.4 starts a thread of its own for each thread that computes, and never ends it. So a process that loads a model
again and again must use the same threads.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

import mlx.core as mx

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
