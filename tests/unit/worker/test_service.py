"""The tasks of a worker's calls end with the calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from worker.node.service import WorkerService


async def count_of_tasks() -> int:
    """Return the number of tasks after every ready task has run. It does not depend on the clock."""
    for _ in range(100):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks())


async def test_a_signals_call_leaves_no_task() -> None:
    """A call that ends during its wait for a change leaves no task."""
    node: Any = SimpleNamespace(state_changed=asyncio.Event())
    service = WorkerService(node)
    reader = asyncio.create_task(asyncio.sleep(60))
    call = asyncio.create_task(service._wait_for_change(reader, 60.0))
    assert await count_of_tasks() == 4, "the test, the reader, the call, its wait for a change"
    for task in (call, reader):
        task.cancel()
    await asyncio.gather(call, reader, return_exceptions=True)
    assert await count_of_tasks() == 1
