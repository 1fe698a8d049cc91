"""What a worker's calls leave behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from worker.node.service import WorkerService


async def count_of_tasks() -> int:
    """How many there are once all that could run has: a busy machine's clock says nothing about that."""
    for _ in range(100):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks())


async def test_a_signals_call_that_ends_takes_its_wait_along() -> None:
    """A call is ended amid its wait for news whenever a connection breaks: no task of it is left."""
    node: Any = SimpleNamespace(news=asyncio.Event())
    service = WorkerService(node)
    reader = asyncio.create_task(asyncio.sleep(60))
    call = asyncio.create_task(service._until_news(reader, 60.0))
    assert await count_of_tasks() == 4, "the test, the reader, the call, its wait for news"
    for task in (call, reader):
        task.cancel()
    await asyncio.gather(call, reader, return_exceptions=True)
    assert await count_of_tasks() == 1
