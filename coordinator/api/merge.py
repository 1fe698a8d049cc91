"""The events of several requests as one stream, with a deadline on every wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from coordinator.generation.request import Finished, GenerationEvent, GenerationRequest, Generator
from proto.errors import ClusterError

_running: set[asyncio.Task[None]] = set()
"""The event loop itself keeps only weak references to its tasks."""


class Merge:
    """Runs requests side by side from the moment it is made. Whoever makes it calls `close`.

    Each request has a task, which ends on its own soon after it is cancelled: closing waits for nothing, so that it
    works where waiting is no longer possible, as in a handler whose client has left.
    """

    def __init__(self, generator: Generator, requests: Sequence[GenerationRequest]) -> None:
        self._generator = generator
        # Not bounded: it holds tokens, of which each request has its own limit.
        self._queue: asyncio.Queue[tuple[int, GenerationEvent | BaseException]] = asyncio.Queue()
        self._unwanted: set[int] = set()
        self._tasks = [
            asyncio.create_task(self._pump(index, request), name=request.request_id)
            for index, request in enumerate(requests)
        ]
        for index, task in enumerate(self._tasks):
            _running.add(task)
            task.add_done_callback(partial(self._ended, index))

    async def next(self, seconds: float) -> tuple[int, GenerationEvent] | None:
        """The next event and whose it is; None when `seconds` pass first.

        Raises whatever the generator raised, ClusterError for what a client may be told.
        """
        try:
            async with asyncio.timeout(seconds):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        return index, event

    def cancel(self, index: int) -> None:
        """Stop one request; what it has sent may still come, but no error of its end."""
        self._unwanted.add(index)
        self._tasks[index].cancel()

    def close(self) -> None:
        """Stop all that still run."""
        for task in self._tasks:
            task.cancel()

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        # The task waits inside the generator only, so cancelling the task runs the generator's own cleanup.
        finished = False
        async for event in self._generator.generate(request):
            self._queue.put_nowait((index, event))
            finished = isinstance(event, Finished)
        if not finished:
            raise ClusterError("the request ended without a result")

    def _ended(self, index: int, task: asyncio.Task[None]) -> None:
        _running.discard(task)
        if not task.cancelled() and (error := task.exception()) and index not in self._unwanted:
            self._queue.put_nowait((index, error))
