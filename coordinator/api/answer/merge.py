"""The events of several generation requests as one stream, with a deadline on every wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from coordinator.generation.request import Finished, GenerationEvent, GenerationRequest, Generator
from proto.errors import ClusterError

_running: set[asyncio.Task[None]] = set()
"""Strong references to the tasks. The event loop keeps weak references only."""


BACKLOG, BACKLOG_OF_REQUEST = 1024, 256
"""Events that may wait for a client, and more of them for each request. About 2 KB each with log-probabilities.

The connection ends a client that reads nothing for STALL_SECONDS. Until then the answer must not fill the memory.
"""


class _Run:
    """One request of a Merge: the index of its choice, and its task."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.replaced = False

    def cancel(self) -> None:
        """Stop the task; its errors no longer matter."""
        self.cancelled = True
        assert self.task is not None
        self.task.cancel()


class Merge:
    """Concurrent generation requests, started by the constructor. The owner calls `close`.

    Each request has a task that ends soon after it is cancelled. `close` waits for nothing, so it works in a handler
    whose client has disconnected.
    """

    def __init__(self, generator: Generator, requests: Sequence[GenerationRequest]) -> None:
        self._generator = generator
        self._queue: asyncio.Queue[tuple[_Run, GenerationEvent | BaseException]] = asyncio.Queue()
        self._backlog = BACKLOG + BACKLOG_OF_REQUEST * len(requests)
        self._runs = [self._start(index, request) for index, request in enumerate(requests)]

    async def next_event(self, seconds: float) -> tuple[int, GenerationEvent] | None:
        """Return the next event with the index of its request, or None after `seconds` without an event.

        Raises the exception of a request that failed; clients may see the message of a ClusterError.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    run, event = await self._queue.get()
                    if not run.replaced:
                        break
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        return run.index, event

    def cancel_request(self, index: int) -> None:
        """Stop one request. Events already in the queue may still arrive, but no error of the cancelled request."""
        self._runs[index].cancel()

    def replace_request(self, index: int, request: GenerationRequest) -> None:
        """Stop one request and start `request` in its place. No event of the stopped request arrives any more."""
        self._runs[index].replaced = True
        self._runs[index].cancel()
        self._runs[index] = self._start(index, request)

    def close(self) -> None:
        """Stop all requests that still run."""
        for run in self._runs:
            run.cancel()

    def _start(self, index: int, request: GenerationRequest) -> _Run:
        run = _Run(index)
        run.task = asyncio.create_task(self._pump(run, request), name=request.request_id)
        _running.add(run.task)
        run.task.add_done_callback(partial(self._record_end, run))
        return run

    async def _pump(self, run: _Run, request: GenerationRequest) -> None:
        # The task waits only inside the generator, so cancelling the task runs the generator's own cleanup.
        finished = False
        async for event in self._generator.generate(request):
            self._queue.put_nowait((run, event))
            finished = isinstance(event, Finished)
            if not run.cancelled and self._queue.qsize() > self._backlog:
                error = ClusterError("the client did not read its answer. Read it faster.")
                self._queue.put_nowait((run, error))
                run.cancel()
        if not finished:
            raise ClusterError("the request ended without a result. Send it again.")

    def _record_end(self, run: _Run, task: asyncio.Task[None]) -> None:
        _running.discard(task)
        if not task.cancelled() and (error := task.exception()) and not run.cancelled:
            self._queue.put_nowait((run, error))
