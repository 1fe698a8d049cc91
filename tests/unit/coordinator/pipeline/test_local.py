"""Tests of the stages in this process: failures, a stuck engine, and the pipeline after it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest

from coordinator.pipeline import local_pipeline as local
from coordinator.pipeline.local_pipeline import LocalModel, LocalPipelines
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import MemoryLimitError, NotReadyError, ProtocolError, WorkerLostError
from proto.frame import Admit, Evict, Frame, Op, Segment
from proto.stage_options import StageOptions
from tests.support.checkpoints.checkpoints import write_checkpoint
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_engine import FrameEngine
from worker.engine.hardware import default_memory_limit
from worker.engine.host import PROBE_SECONDS

FRAME = Frame(1, 0, ops=(Admit(0, 8, 4),), segments=(Segment(0, 0, 0, (1, 2, 3, 4), sample=True),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """Return the model that the tests load."""
    path: Path = write_checkpoint(tmp_path_factory.mktemp("toy"))
    return LocalModel(Checkpoint.open(path))


def block_until(free: threading.Event, *_: object) -> None:
    """Block until `free` is set, and then fail."""
    free.wait(100)
    raise RuntimeError("this engine was stuck")


@contextmanager
def impatient() -> Iterator[None]:
    """Make the engine count as stuck after a moment, and do not wait for it at the end.

    It is for stuck engines only: on a busy machine real work would count as stuck too.
    """
    with (
        patch.object(local, "STUCK_SECONDS", 0.1),
        patch.object(local, "WATCH_SECONDS", 0.02),
        patch("worker.engine.frame_times.FIRST_SECONDS", 0.1),
        patch("worker.engine.engine_thread.CLOSE_SECONDS", 0.1),
    ):
        yield


async def test_a_stuck_engine_is_an_error(model: LocalModel) -> None:
    """`receive_frame` raises while the engine is stuck.

    No second copy of the model is loaded beside the stuck one. Once it has ended, the next pipeline serves.
    """
    free = threading.Event()
    pipelines = LocalPipelines(model)
    pipeline = await pipelines.make(1)
    with patch.object(FrameEngine, "begin_frame", partial(block_until, free)):
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
    """A load from a disk that never answers ends with an error."""
    free = threading.Event()
    with (
        impatient(),
        patch("worker.engine.host.load_stage", lambda *_, **__: free.wait(100)),
        patch("worker.engine.host.PART_SECONDS", 0.1),
    ):
        async with asyncio.timeout(60):
            with pytest.raises(WorkerLostError, match="stuck"):
                await LocalPipelines(model).make(1)
        free.set()


async def test_any_loading_error_is_a_cluster_error(model: LocalModel) -> None:
    """MLX raises RuntimeError when memory runs out. Loading converts it to a ClusterError."""

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    with (
        patch("worker.engine.host.load_stage", out_of_memory),
        pytest.raises(WorkerLostError, match=r"loading the model failed.*Unable to allocate"),
    ):
        await LocalPipelines(model).make(1)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (Frame(1, 5, segments=FRAME.segments), "frame 5"),
        (replace(FRAME, ops=()), "not admitted"),  # an error with another in its context
    ],
)
async def test_an_engine_that_failed_frees_its_weights(model: LocalModel, frame: Frame, said: str) -> None:
    """The weights of a failed engine are freed at once.

    Neither the raised error nor the thread that raised it refers to them. Otherwise the next load would need the memory
    twice.
    """

    def post_and_linger(self: EngineThread, function: Callable[..., None], *args: object) -> None:
        post(self, function, *args)
        time.sleep(0.2)  # the waiter for the error continues before the thread does

    post = EngineThread.post
    pipeline = await LocalPipelines(model).make(1)
    assert pipeline._engine is not None
    stage = weakref.ref(pipeline._engine.stage)
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
    """A long chunk at the end of a plan is not stuck. The next plan waits for its end."""
    free = threading.Event()
    pipelines = LocalPipelines(model)
    first = await pipelines.make(1)
    with (
        patch.object(FrameEngine, "begin_frame", partial(block_until, free)),
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


@pytest.mark.parametrize("exact", [False, True])
async def test_the_check_of_exact_mode_has_a_deadline_of_its_own(model: LocalModel, exact: bool) -> None:
    """On CUDA it compiles for minutes, which must not look like a stuck engine."""
    deadlines: list[float] = []
    with patch.object(EngineThread, "expect", lambda _, seconds: deadlines.append(seconds)):
        pipeline = await LocalPipelines(replace(model, options=StageOptions(exact=exact))).make(1)
        await pipeline.close()
    assert (PROBE_SECONDS in deadlines) is exact


async def test_a_pipeline_leaves_the_memory_of_local_workers_free(model: LocalModel) -> None:
    """The plan leaves out the bytes that workers on this machine use. A model that then does not fit is refused."""
    pipelines = LocalPipelines(model)
    pipelines.reserved_bytes = lambda: default_memory_limit() - 2**20
    with pytest.raises(MemoryLimitError):
        await pipelines.make(1)


async def test_buffers_of_a_prompt_are_returned_after_its_last_chunk(model: LocalModel) -> None:
    """Over prompts of growing length the cache of freed buffers is empty after each, and the limit of MLX is set."""
    pipeline = await LocalPipelines(model).make(1)
    assert mx.get_memory_limit() == default_memory_limit()
    cached = []
    for number, width in enumerate((64, 96, 160, 256, 416)):
        ops: list[Op] = [Admit(number, 1024, width)]
        ops += [Evict(number - 1)] if number else []
        prompt = Segment(number, 0, 0, (7,) * width, sample=True)
        pipeline.send_frame(Frame(1, number, tuple(ops), (prompt,)))
        async with asyncio.timeout(60):
            await pipeline.receive_frame()
        cached.append(await pipeline.thread.call(mx.get_cache_memory))
    await pipeline.close()
    assert cached == [0] * 5
