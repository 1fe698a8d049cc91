"""The calls of a worker: their tasks, and the thread of their work."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from proto import cluster_pb2 as pb
from proto.errors import NotReadyError
from worker.engine.engine_thread import EngineThread
from worker.node import service
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


async def test_a_backup_is_taken_on_the_engine_thread() -> None:
    """The engine thread drops backups above their number. No other thread may remove one meanwhile."""
    callers = []

    def begin_reading(seq_id: int) -> Any:
        callers.append(threading.current_thread().name)
        raise NotReadyError(f"sequence {seq_id} has no backup here")

    thread = EngineThread()
    backups = SimpleNamespace(begin_reading=begin_reading, made={})
    binding = SimpleNamespace(
        place=SimpleNamespace(epoch=1), engine=SimpleNamespace(backups=backups)
    )
    host = SimpleNamespace(thread=thread)
    node: Any = SimpleNamespace(binding=binding, host=host, renew_lease=lambda _: None)
    context: Any = None
    with pytest.raises(NotReadyError):
        await anext(aiter(WorkerService(node).ReadBackup(pb.BackupRequest(epoch=1), context)))
    await thread.close()
    assert callers == ["engine"]


def message(done: int) -> pb.LoadProgress:
    """Return a message of progress."""
    return pb.LoadProgress(progress=pb.LoadBytes(done=done, total=9))


async def test_a_silent_load_repeats_its_newest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a load computes, its newest message is sent again; the empty message ends the stream."""
    monkeypatch.setattr(service, "REPEAT_SECONDS", 0.02)
    queue: asyncio.Queue[pb.LoadProgress] = asyncio.Queue()
    queue.put_nowait(message(3))
    found = []
    async with asyncio.timeout(10):
        async for one in service.repeat_progress(queue):
            found.append(one)
            if len(found) == 3:
                queue.put_nowait(message(9))
                queue.put_nowait(pb.LoadProgress())
    assert found == [message(3)] * 3 + [message(9)]
