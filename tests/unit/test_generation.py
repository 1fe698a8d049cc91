"""The generation loop over pipelines that come and go, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.generation import MOST_FAILURES, GenerationLoop
from coordinator.pipeline import Pipeline
from coordinator.request import Finished, GenerationEvent, GenerationRequest, TokenChunk
from coordinator.scheduler import Limits, Scheduler
from mtp.controller import Controller, MtpMode
from proto.errors import ClusterError, StaleEpochError, WorkerLostError
from tests.fake_last_stage import plain
from tests.simulation import SimulatedPipeline, Timing, run_virtually

PROMPT = (1, 2, 3)


class Failing:
    """A source whose first pipelines end with these errors as soon as they are taken."""

    def __init__(self, errors: list[ClusterError]) -> None:
        self.errors = errors
        self.lost = 0

    async def acquire(self) -> Pipeline:
        pipeline = SimulatedPipeline(Timing(2), epoch=self.lost)
        pipeline.last.epoch = self.lost
        if self.lost < len(self.errors):
            pipeline.fail(self.errors[self.lost])
        return pipeline

    def failed(self, pipeline: Pipeline, error: Exception) -> None:
        self.lost += 1


async def events(errors: list[ClusterError]) -> list[GenerationEvent]:
    """What the client of one request hears."""
    scheduler = Scheduler(Limits(100), Controller(MtpMode(1)))
    loop = GenerationLoop(Failing(errors), scheduler, asyncio.get_running_loop().time)
    await loop.start()
    try:
        return [event async for event in loop.generate(GenerationRequest(PROMPT, 10))]
    finally:
        await loop.close()


@pytest.mark.parametrize(
    "errors",
    [
        [WorkerLostError("gone")] * (MOST_FAILURES - 1),
        [StaleEpochError("replaced")] * 3 * MOST_FAILURES,
        [StaleEpochError("replaced"), WorkerLostError("gone")] * (MOST_FAILURES - 1),
    ],
)
def test_a_request_outlives_plans(errors: list[ClusterError]) -> None:
    """A few plans that fail, and any number that give way to others, change no token."""
    heard = run_virtually(events(errors))
    chunks = [event for event in heard if isinstance(event, TokenChunk)]
    assert [token for chunk in chunks for token in chunk.tokens] == plain(PROMPT, 10)


def test_a_request_that_no_plan_survives_ends() -> None:
    """It may be what kills them: its client hears an error, and the plans after it live."""
    heard = run_virtually(events([WorkerLostError("gone")] * MOST_FAILURES))
    (end,) = [event for event in heard if isinstance(event, Finished)]
    assert end.reason == "error"
    assert "in a row" in (end.error or "")
