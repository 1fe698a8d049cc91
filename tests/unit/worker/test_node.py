"""The state of a worker during concurrent events: overlapping loads, and an end during a load."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

import worker.node.node
from mtp import device
from proto import cluster_pb2 as pb
from proto.errors import CheckpointError, NotReadyError, StaleEpochError
from tests.support.processes.waits import until
from worker.engine.host import EngineHost, LoadedStage, StageSpec
from worker.model.stage import StageForward
from worker.node.member import MAX_LINE, MemberProcess, relay_log
from worker.node.node import WorkerNode

ME = pb.Coordinator(id="c", name="c")
PATIENCE = 20.0
"""Seconds. Deadline of events that should happen at once."""


class Reading:
    """A fake reader of weights: held layers have parts without end until `finish` is set."""

    def __init__(self) -> None:
        self.held_up = -1
        """First layer of the span whose reading is held."""
        self.begun = threading.Event()
        self.finish = threading.Event()

    def __call__(
        self, open_checkpoint: Any, spec: StageSpec, on_progress: Callable[..., None], **_: Any
    ) -> LoadedStage:
        if spec.span.start == self.held_up:
            self.begun.set()
            while not self.finish.wait(0.01):
                on_progress(1, 2)
        stage = MagicMock()
        stage.variants.summary = "reference"
        stage.modules.config = SimpleNamespace(num_experts=8)
        return LoadedStage(spec, stage, 0)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    found = Reading()
    monkeypatch.setattr(EngineHost, "load", found)
    return found


@pytest.fixture
async def node(reading: Reading) -> AsyncIterator[WorkerNode]:
    identity: Any = MagicMock()
    identity.configure_mock(name="w")
    node = WorkerNode(identity)
    yield node
    reading.finish.set()
    await node.close()
    assert not node.host.thread.alive


def load(node: WorkerNode, epoch: int, start: int) -> asyncio.Task[pb.LoadResult]:
    request = pb.LoadRequest(coordinator=ME, epoch=epoch, span=pb.Span(start=start, end=start + 1), lease_ms=60_000)
    return asyncio.create_task(node.load(request, lambda done, total: None))


async def load_held_up(node: WorkerNode, reading: Reading, epoch: int = 1) -> asyncio.Task[pb.LoadResult]:
    """Start a load of layer 0 and wait until it reads parts."""
    reading.held_up = 0
    task = load(node, epoch, 0)
    await asyncio.to_thread(reading.begun.wait, PATIENCE)
    return task


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_next_load_waits_for_no_other(node: WorkerNode, reading: Reading, cancelled: bool) -> None:
    """A load whose plan is over ends at its next part, even if its call has not ended. The next load's stage stays.

    A large stage takes minutes. Without this, the next coordinator would receive nothing and give the worker up.
    """
    first = await load_held_up(node, reading)
    if cancelled:
        first.cancel()
    async with asyncio.timeout(PATIENCE):
        await load(node, 2, 4)
        (ended,) = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError if cancelled else StaleEpochError)
    assert node.loaded is not None and node.loaded.spec.span.start == 4
    assert node.state == pb.WORKER_STATE_LOADED


async def test_a_load_ends_with_its_claim(node: WorkerNode, reading: Reading) -> None:
    """After a coordinator leaves, no partial stage and no loading state remain."""
    first = await load_held_up(node, reading)
    node.release()
    assert node.state == pb.WORKER_STATE_IDLE
    async with asyncio.timeout(PATIENCE):
        (ended,) = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(ended, StaleEpochError)
    assert node.loaded is None
    assert node.state == pb.WORKER_STATE_IDLE


async def test_a_worker_that_drains_says_so(node: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draining worker stays draining, even if a Load arrives at the same time."""
    node.drain()
    await load(node, 1, 0)
    assert node.state == pb.WORKER_STATE_DRAINING
    node._failed()
    assert node.state == pb.WORKER_STATE_DRAINING
    monkeypatch.setattr(EngineHost, "load", MagicMock(side_effect=CheckpointError("gone")))
    with pytest.raises(CheckpointError):
        await load(node, 2, 4)
    assert node.state == pb.WORKER_STATE_DRAINING


async def test_unloaded_weights_are_gone(node: WorkerNode) -> None:
    """An Unload releases weights that no plan was connected with, too."""
    await load(node, 1, 0)
    stage = stage_of(node)
    node.unload(pb.UnloadRequest(coordinator=ME, epoch=1))
    await released(stage)


async def test_a_stage_is_gone_while_the_next_one_loads(node: WorkerNode, reading: Reading) -> None:
    """The machine may not have the memory for both."""
    await load(node, 1, 4)
    stage = stage_of(node)
    loading = await load_held_up(node, reading, epoch=2)
    await released(stage)
    reading.finish.set()
    await loading


def stage_of(node: WorkerNode) -> weakref.ref[StageForward]:
    """Return a reference to the loaded stage that does not keep it."""
    assert node.loaded is not None
    return weakref.ref(node.loaded.stage)


async def released(stage: weakref.ref[StageForward]) -> None:
    """Wait until nothing holds the stage."""
    await until(lambda: gc.collect() >= 0 and stage() is None, "the release of the stage")


async def test_a_load_reports_the_frames_that_suit_its_gpu(node: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator may have another GPU, or none. The worker knows its own, and the model."""
    found = await load(node, 1, 0)
    assert (found.longest_chunk, found.shortest_chunk) == (512, 128)
    metal = device.Arithmetic("metal", "applegpu_g16s", "1")
    monkeypatch.setattr(device.Arithmetic, "here", lambda: metal)
    monkeypatch.setattr(device, "this_device", lambda: device.DEVICES["metal"])
    found = await load(node, 2, 0)
    assert (found.longest_chunk, found.shortest_chunk) == (512, 512)


async def test_a_cancelled_start_keeps_the_spare_process(node: WorkerNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waits for the end of the process before, with a deadline, and takes the spare one only then."""
    monkeypatch.setattr(worker.node.node, "END_SECONDS", 0.2)
    spare: Any = MagicMock(running=True, stop=AsyncMock())
    node._spares = [spare]
    ending = node._ending = asyncio.create_task(asyncio.sleep(PATIENCE))
    start = asyncio.create_task(node.start_member(pb.MemberRequest(coordinator=ME, epoch=1)))
    await asyncio.sleep(0.05)
    start.cancel()
    await asyncio.wait({start})
    with pytest.raises(NotReadyError, match="does not end"):
        await node.start_member(pb.MemberRequest(coordinator=ME, epoch=2))
    assert node._spares == [spare]
    ending.cancel()


async def test_the_log_of_a_member_is_that_of_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The worker's log rotates. It has the members' records with their fields, and what their libraries print."""
    fields = {"time": "now", "level": "error", "logger": "worker.engine", "message": "100 % lost", "epoch": 3}
    stream = asyncio.StreamReader(MAX_LINE)
    lines = (b"x" * (2 * MAX_LINE), b"Traceback of a library", b"[7]", json.dumps(fields).encode())
    stream.feed_data(b"\n".join(lines) + b"\n")
    stream.feed_eof()
    async with asyncio.timeout(10):
        await relay_log(stream, 7)
    assert [(r.levelname, r.name, r.getMessage(), vars(r)["member"]) for r in caplog.records] == [
        ("WARNING", "worker.node.member", "Traceback of a library", 7),
        ("WARNING", "worker.node.member", "[7]", 7),
        ("ERROR", "worker.engine", "100 % lost", 7),
    ]
    assert vars(caplog.records[-1])["epoch"] == 3
    member = await MemberProcess.spawn(("--no-such-flag",))
    await until(lambda: "no-such-flag" in caplog.text, "the error of the process")
    await member.stop()
