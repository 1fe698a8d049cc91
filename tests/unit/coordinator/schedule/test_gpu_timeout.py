"""Prompts that are too long for a GPU's watchdog."""

from __future__ import annotations

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.schedule.loop import MAX_FAILURES, is_gpu_timeout
from coordinator.schedule.prompts import SHORTEST_CHUNK, Limits
from coordinator.schedule.request import Finished
from coordinator.schedule.scheduler import Scheduler
from proto.errors import WorkerLostError
from tests.support.protocol.simulation import SimulatedPipeline, Timing, run_virtually
from tests.unit.coordinator.schedule.test_loop import heard

TIMEOUT = (
    "w1: RuntimeError: [METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
INTERACTIVITY = (
    "the engine failed: RuntimeError: [METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)
MEMORY = (
    "RuntimeError: [METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


@pytest.mark.parametrize("message", [TIMEOUT, INTERACTIVITY, MEMORY])
def test_metal_s_texts_are_recognized(message: str) -> None:
    """The three errors that a long chunk causes are recognized in a worker's and in this process's text."""
    assert is_gpu_timeout(message)


@pytest.mark.parametrize(
    "message",
    ["10.0.0.2:50505 timed out", "RuntimeError: [METAL] Unable to load kernel", "Timeout"],
)
def test_other_failures_are_not_recognized(message: str) -> None:
    """A network timeout and other errors of Metal say nothing about the chunk's length."""
    assert not is_gpu_timeout(message)


class Watchdog:
    """A source whose first `most` pipelines fail with `message` until chunks have at most `longest` tokens."""

    def __init__(self, message: str, longest: int, most: int = 100) -> None:
        self.message, self.longest, self.most = message, longest, most
        self.scheduler = Scheduler(Limits(2000, prefill_chunk=512), Controller(MtpMode(0)))
        self.epoch = 0

    async def acquire(self) -> Pipeline:
        """Return a pipeline that fails at once while chunks are too long."""
        pipeline = SimulatedPipeline(Timing(2), epoch=self.epoch)
        pipeline.last.engine.epoch = self.epoch
        too_long = self.scheduler.limits.longest_chunk > self.longest
        if too_long and self.epoch < self.most:
            pipeline.fail(WorkerLostError(self.message))
        return pipeline

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        """Count the pipeline."""
        self.epoch += 1


def end_of(source: Watchdog) -> Finished:
    """Return the end of one request."""
    end = run_virtually(heard(source, source.scheduler))[-1]
    assert isinstance(end, Finished)
    return end


def test_a_long_prompt_is_tried_with_shorter_chunks() -> None:
    """Chunks are halved until the GPU accepts them, and none of these plans counts as a failure of the request."""
    source = Watchdog(TIMEOUT, SHORTEST_CHUNK)
    assert end_of(source).reason == "length"
    assert source.scheduler.limits.longest_chunk == SHORTEST_CHUNK
    assert source.scheduler.limits.step_tokens == 2048 // 8
    assert source.epoch == 3


def test_a_gpu_that_never_accepts_ends_the_request() -> None:
    """After the shortest chunk, failed plans count, and the request ends with an error."""
    source = Watchdog(TIMEOUT, 0, most=3 + MAX_FAILURES)
    assert end_of(source).reason == "error"
    assert source.scheduler.limits.longest_chunk == SHORTEST_CHUNK


def test_other_failures_keep_the_chunks() -> None:
    """A failure of another kind does not shorten chunks."""
    source = Watchdog("w1: engine failed", 0, most=MAX_FAILURES)
    assert end_of(source).reason == "error"
    assert source.scheduler.limits.longest_chunk == 512
