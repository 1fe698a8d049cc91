"""The calls of a worker: their tasks, the thread of their work, and the threads that use MLX."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import psutil
import pytest

from coordinator.pipeline.worker_client import WorkerClient
from mtp.checkpoint.format.config import ModelConfig
from proto import cluster_pb2 as pb
from proto.errors import NotReadyError, WorkerLostError
from proto.span import Span
from tests.support.processes.waits import until
from worker.engine import engine_thread
from worker.engine.engine_thread import EngineThread
from worker.engine.stage_backups import STATE_BYTES, LayerArrays, SequenceBackup, StageBackups
from worker.node import process, service
from worker.node.node import WorkerNode
from worker.node.options import WorkerOptions
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
    binding = SimpleNamespace(place=SimpleNamespace(epoch=1), engine=SimpleNamespace(backups=backups))
    host = SimpleNamespace(thread=thread)
    node: Any = SimpleNamespace(binding=binding, host=host, renew_lease=lambda _: None)
    context: Any = None
    with pytest.raises(NotReadyError):
        await anext(aiter(WorkerService(node).ReadBackup(pb.BackupRequest(epoch=1), context)))
    await thread.close()
    assert callers == ["engine"]


class Read:
    """A call of `ReadBackup` without a network."""

    def __init__(self, pieces: AsyncIterator[pb.BackupPiece]) -> None:
        self.pieces = pieces

    def __aiter__(self) -> AsyncIterator[pb.BackupPiece]:
        return self.pieces

    def cancel(self) -> None:
        """Do nothing."""


async def test_a_backup_of_a_prompt_passes_its_chunks() -> None:
    """It is read between two frames. To wait for them is no transfer, after 49 times of which the next one begins."""
    thread, backups, chunks = EngineThread(), StageBackups(Span(0, 2), cast(ModelConfig, None)), list[int]()
    layers = [LayerArrays(layer, True, lambda: [mx.zeros(STATE_BYTES // 4)]) for layer in range(2)]
    backups.made = SequenceBackup(3, 5, layers)
    binding = SimpleNamespace(place=SimpleNamespace(epoch=1), engine=SimpleNamespace(backups=backups))
    node: Any = SimpleNamespace(binding=binding, host=SimpleNamespace(thread=thread), renew_lease=lambda _: None)
    context: Any = None

    def ask(request: pb.BackupRequest, timeout: float) -> Read:
        return Read(WorkerService(node).ReadBackup(request, context))

    client: Any = SimpleNamespace(me=pb.Coordinator(), stub=SimpleNamespace(ReadBackup=ask))

    def compute() -> None:
        time.sleep(0.2)
        chunks.append(1)

    for _ in range(6):
        thread.submit_frame(compute)
    began = time.monotonic()
    found = await WorkerClient.read_backup(client, 1, 3, 2**40)
    took = time.monotonic() - began
    assert (found.tokens, [state.layer for state in found.states]) == (5, [0, 1])
    assert len(chunks) < 6, "it waits for a chunk, not for all of them"
    assert found.seconds < took - 0.2, "two waits are no transfer"
    await thread.close()


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


async def use_an_engine() -> weakref.ref[EngineThread]:
    """Compute on a new engine thread, and end it."""
    thread = EngineThread()
    await thread.call(lambda: mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8))))
    await thread.close()
    assert not thread.alive
    return weakref.ref(thread)


async def use_six_engines() -> None:
    """Assert that six engines, one after the other, need the threads of one.

    Each with its own would have two more. A thread of a library may begin or end meanwhile, late on a busy machine.
    """
    await use_an_engine()
    before = psutil.Process().num_threads()
    ended = [await use_an_engine() for _ in range(5)]
    assert abs(psutil.Process().num_threads() - before) < len(ended)
    gc.collect()
    assert [one() for one in ended] == [None] * 5


def test_engines_of_a_process_share_its_threads() -> None:
    """MLX keeps a thread of its own for each thread that has computed, so later engines use the first one's.

    They run in a process of their own, because threads of earlier tests may begin and end here.
    """
    program = f"import asyncio; from {__name__} import use_six_engines; asyncio.run(use_six_engines())"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def broken() -> None:
    """Raise the error of a bug."""
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("way", ["submit", "submit_frame", "submit_urgent", "defer", "on_idle"])
async def test_work_that_raises_ends_the_plan_and_not_the_thread(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged and reported, whichever way its work came. Later work, such as the next load, runs."""
    monkeypatch.setattr(engine_thread, "IDLE_SECONDS", 0.01)
    thread, errors = EngineThread(), list[str]()
    thread.on_failure = lambda error: errors.append(str(error))
    match way:
        case "defer":
            thread.submit_frame(lambda: thread.defer(broken, 0.0))
        case "on_idle":
            thread.on_idle = broken
        case _:
            getattr(thread, way)(broken)
    await until(lambda: errors, "the report")
    async with asyncio.timeout(20):
        assert await thread.call(lambda: "well") == "well"
    assert errors[0] == "a bug" and "work on the engine thread failed" in caplog.text
    await thread.close()


async def test_a_dead_engine_thread_ends_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker whose engine thread has ended cannot load again. It ends with an error, and its service restarts it."""
    nodes: list[WorkerNode] = []

    def make(*arguments: Any) -> WorkerNode:
        nodes.append(WorkerNode(*arguments))
        return nodes[0]

    monkeypatch.setattr(process, "WorkerNode", make)
    monkeypatch.setattr(process, "measured_bandwidth", lambda: 1e9)
    options = WorkerOptions(listen="127.0.0.1:0", no_mdns=True, insecure=True, state_dir=tmp_path)
    running = asyncio.create_task(process.run(options))
    await until(lambda: nodes and nodes[0].tickets.port, "the worker")
    nodes[0].host.thread.submit(sys.exit)
    async with asyncio.timeout(20):
        with pytest.raises(WorkerLostError, match="engine thread has ended"):
            await running
