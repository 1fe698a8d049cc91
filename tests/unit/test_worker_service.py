"""What a worker's calls leave behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from worker.service import WorkerService


async def until(tasks: int) -> None:
    """Wait until there are so many tasks."""
    async with asyncio.timeout(5.0):
        while len(asyncio.all_tasks()) != tasks:
            await asyncio.sleep(0)


async def test_a_signals_call_that_ends_takes_its_wait_along() -> None:
    """A call is ended amid its wait for news whenever a connection breaks: no task of it is left."""
    node: Any = SimpleNamespace(news=asyncio.Event())
    service = WorkerService(node)
    reader = asyncio.create_task(asyncio.sleep(60))
    call = asyncio.create_task(service._until_news(reader, 60.0))
    await until(4)  # the test, the reader, the call, its wait for news
    for task in (call, reader):
        task.cancel()
    await asyncio.gather(call, reader, return_exceptions=True)
    await until(1)
