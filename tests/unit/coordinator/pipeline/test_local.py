"""The stages of this process on their thread: what fails, what gets stuck, what comes after it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from coordinator.pipeline import local
from coordinator.pipeline.local import LocalModel, LocalPipelines
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import NotReadyError, ProtocolError, WorkerLostError
from proto.frame import Admit, Frame
from proto.segment import Segment
from proto.span import Span
from tests.support.checkpoints.checkpoints import write_checkpoint
from worker.engine.engine_thread import EngineThread
from worker.engine.stage_engine import StageEngine

FRAME = Frame(1, 0, ops=(Admit(0, 8, 4),), segments=(Segment(0, 0, 0, (1, 2, 3, 4), sample=True),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("toy"))
    checkpoint = Checkpoint.open(path)
    return LocalModel(checkpoint, [Span(0, checkpoint.config.num_layers)])


@contextmanager
def impatient() -> Iterator[None]:
    """Stuck after a moment, and not waited for at the end. For what gets stuck alone: to a machine in use any real work
    looks so."""
    with (
        patch.object(local, "STUCK_SECONDS", 0.1),
        patch.object(local, "WATCH_SECONDS", 0.02),
        patch("worker.engine.deadline.FIRST_SECONDS", 0.1),
        patch("worker.engine.engine_thread.CLOSE_SECONDS", 0.1),
    ):
        yield


async def test_a_stuck_engine_is_an_error(model: LocalModel) -> None:
    """Whoever waits for a frame hears so. No second copy of the model is loaded beside the stuck one; once that
    has ended, another serves."""
    free = threading.Event()
    pipelines = LocalPipelines(model)
    pipeline = await pipelines.make(1)
    with patch.object(StageEngine, "process", lambda self, frame: free.wait(100)):
        with impatient():
            pipeline.send_frame(FRAME)
            async with asyncio.timeout(60):
                with pytest.raises(WorkerLostError, match="stuck"):
                    await pipeline.receive_frame()
            await pipeline.close()
            with pytest.raises(NotReadyError, match="restart mtp-coord"):
                await pipelines.make(2)
        free.set()
        while pipeline.thread.alive:
            await pipeline.thread.close()
    other = await pipelines.make(1)
    other.send_frame(FRAME)
    async with asyncio.timeout(60):
        assert (await other.receive_frame()).outcomes[0].token is not None
    await other.close()


async def test_a_stuck_load_is_an_error(model: LocalModel) -> None:
    """A disk that never answers: the wait for it ends."""
    free = threading.Event()
    with (
        impatient(),
        patch.object(local, "load_stage", lambda *_, **__: free.wait(100)),
        patch("worker.node.loading.PART_SECONDS", 0.1),
    ):
        async with asyncio.timeout(60):
            with pytest.raises(WorkerLostError, match="stuck"):
                await LocalPipelines(model).make(1)
        free.set()


async def test_whatever_loading_raises_is_told(model: LocalModel) -> None:
    """MLX raises RuntimeError when memory runs out: that too is an error those who wait for a plan understand."""

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    with (
        patch.object(local, "load_stage", out_of_memory),
        pytest.raises(WorkerLostError, match=r"loading the model failed.*Unable to allocate"),
    ):
        await LocalPipelines(model).make(1)


async def test_an_engine_that_fails_says_so_for_good(model: LocalModel) -> None:
    """And runs nothing that follows."""
    pipeline = await LocalPipelines(model).make(1)
    pipeline.send_frame(Frame(1, 5, segments=FRAME.segments))
    pipeline.send_frame(FRAME)
    async with asyncio.timeout(60):
        for _ in range(2):
            with pytest.raises(Exception, match="frame 5"):
                await pipeline.receive_frame()
    await pipeline.close()


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (Frame(1, 5, segments=FRAME.segments), "frame 5"),
        (replace(FRAME, ops=()), "never admitted"),  # an error with another in its context
    ],
)
async def test_an_engine_that_failed_lets_go_of_its_weights(
    model: LocalModel, frame: Frame, said: str
) -> None:
    """At once: neither the error that is told nor the thread that told it leads to a frame that holds them, or the next
    load would need the memory twice."""

    def post_and_linger(self: EngineThread, function: Callable[..., None], *args: object) -> None:
        post(self, function, *args)
        time.sleep(0.2)  # whoever waits for the error goes on before the thread does

    post = EngineThread.post
    pipeline = await LocalPipelines(model).make(1)
    stage = weakref.ref(pipeline._engines[0].stage)
    gc.disable()
    try:
        with patch.object(EngineThread, "post", post_and_linger):
            pipeline.send_frame(frame)
            async with asyncio.timeout(60):
                with pytest.raises(ProtocolError, match=said):
                    await pipeline.receive_frame()
            assert stage() is None
    finally:
        gc.enable()
    await pipeline.close()


async def test_a_thread_that_finishes_is_waited_for(model: LocalModel) -> None:
    """A long chunk under way at the end of a plan is not stuck: the next plan waits for its end."""
    free = threading.Event()
    pipelines = LocalPipelines(model)
    first = await pipelines.make(1)
    with (
        patch.object(StageEngine, "process", lambda self, frame: free.wait(100)),
        patch("worker.engine.engine_thread.CLOSE_SECONDS", 0.05),
    ):
        first.send_frame(FRAME)
        await first.close()
        assert first.thread.alive
        making = asyncio.create_task(pipelines.make(2))
        await asyncio.sleep(0.2)
        assert not making.done()
        free.set()
        async with asyncio.timeout(60):
            second = await making
    await second.close()
