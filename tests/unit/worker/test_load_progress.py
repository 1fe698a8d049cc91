"""The messages of a load."""

from __future__ import annotations

import asyncio

import pytest

from proto import cluster_pb2 as pb
from worker.node import service


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
