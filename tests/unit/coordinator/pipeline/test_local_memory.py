"""The memory of a pipeline in the coordinator's process."""

from __future__ import annotations

import asyncio

import mlx.core as mx
import pytest

from coordinator.pipeline.local_pipeline import LocalModel, LocalPipelines
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import MemoryLimitError
from proto.frame import Admit, Evict, Frame, Op, Segment
from proto.span import Span
from worker.engine.hardware import default_memory_limit


@pytest.fixture(scope="module")
def model() -> LocalModel:
    """Return the built-in model in one stage."""
    checkpoint = Checkpoint.open(checkpoint_dir())
    return LocalModel(checkpoint, [Span(0, checkpoint.config.num_layers)])


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
