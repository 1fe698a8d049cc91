"""Tests of the order of prompts, of their part of the time, and of the queue's fairness between clients."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.schedule.prompts import (
    FIRST_FRAME,
    SECONDS_ALONE,
    SECONDS_BESIDE_STREAMS,
    SHORTEST_FRAME,
    Limits,
    Prompts,
)
from coordinator.schedule.request import Finished
from coordinator.schedule.scheduler import Scheduler
from mtp.device import FrameLimits
from proto.errors import CapacityError
from proto.frame import Frame, Segment
from tests.support.protocol.scheduler_drive import ROOM, Drive, chunks_of
from tests.support.protocol.simulation import Simulation, Timing, run_virtually

LONG = Limits(context=1000, prefill_chunk=8, step_tokens=8)
TWO = replace(ROOM, sequences=2)


def chunk_frame(tokens: int, seconds: float) -> Frame:
    """Return a returned frame with one prompt chunk, whose slowest stage took `seconds`."""
    segment = Segment(0, 0, position=0, tokens=(1,) * tokens)
    return Frame(1, 0, (), (segment,), stage_us=(100, int(seconds * 1e6)))


def test_chunks_suit_the_machines_of_each_plan() -> None:
    """A plan brings the lengths of its machines. The user's length, or one that a GPU accepts, counts more."""
    scheduler = Scheduler(Limits(10_000), Controller(MtpMode(0)))
    for frames in (FrameLimits(1024, 1024), FrameLimits(512, 128)):
        scheduler.reset(1, 1, ROOM, 0.0, frame_limits=frames)
        assert scheduler.limits.chunk_length(9000) == frames.longest
        assert scheduler.limits.chunk_length(9) == frames.shortest
    shorter = scheduler.limits.with_shorter_chunks()
    assert shorter is not None
    scheduler.limits = shorter
    scheduler.reset(1, 2, ROOM, 0.0, frame_limits=FrameLimits(1024, 128))
    assert scheduler.limits.chunk_length(9000) == 256


# ---- the time of prompts


def test_a_short_prompt_has_no_shorter_chunks_than_the_gpu_computes_fast() -> None:
    """A prompt is cut into eight chunks or more, of the shortest to the longest useful length."""
    limits = Limits(10_000, frames=FrameLimits(1024, 512))
    assert [limits.chunk_length(tokens) for tokens in (100, 4000, 6000, 9000)] == [
        512,
        512,
        750,
        1024,
    ]
    assert replace(limits, prefill_chunk=256).chunk_length(6000) == 256, "the longest counts"


@pytest.mark.parametrize("stages", [1, 4])
def test_the_budget_follows_the_measured_time(stages: int) -> None:
    """Frames of all stages take at most the time beside streams. Without streams they take longer."""
    prompts, limits = Prompts(), Limits(context=1000)
    assert prompts.frame_tokens(limits, stages, streams=True) == FIRST_FRAME
    prompts.record_frame(chunk_frame(100, 0.05))
    beside = prompts.frame_tokens(limits, stages, streams=True)
    assert beside % SHORTEST_FRAME == 0
    assert SECONDS_BESIDE_STREAMS / 2 < beside * stages * 0.0005 <= SECONDS_BESIDE_STREAMS
    alone = prompts.frame_tokens(limits, stages, streams=False)
    assert prompts.expected_seconds(200) == pytest.approx(0.1)
    assert SECONDS_ALONE * 0.9 < alone * stages * 0.0005 <= SECONDS_ALONE


async def flood_with_prompts(timing: Timing, prompts: int, length: int) -> tuple[float, float]:
    """Run a stream while `prompts` long ones arrive, and a short request.

    Return the longest gap of the stream and the seconds to the first token of the short request.
    """
    async with Simulation(timing, chunk=512, frame=2048) as simulation:
        stream = asyncio.create_task(simulation.stream(3, 150))
        await asyncio.sleep(0.5)
        long = [asyncio.create_task(simulation.stream(length, 4, i)) for i in range(prompts)]
        await asyncio.sleep(5.0)
        began = simulation.clock()
        first = (await simulation.stream(11, 4, 7))[0] - began
        times = await stream
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return max(b - a for a, b in itertools.pairwise(times)), first


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_long_prompts_of_many_clients_hold_nobody_up(stages: int) -> None:
    """While 16 prompts of 20,000 tokens are computed, a stream goes on, and a short request is answered soon.

    A token of a prompt takes 4 ms in all stages together, so the prompts need 21 minutes.
    """
    timing = Timing(stages, 0.02 / stages, token=0.004 / stages)
    gap, first = run_virtually(flood_with_prompts(timing, 16, 20_000))
    assert gap < 2 * SECONDS_BESIDE_STREAMS
    assert first < 4 * SECONDS_BESIDE_STREAMS


@pytest.mark.parametrize("stages", [1, 2])
def test_prompts_keep_their_speed_while_no_stream_runs(stages: int) -> None:
    """A prompt of many frames takes at most 1.15 times the time of its tokens alone."""

    async def seconds() -> float:
        async with Simulation(timing, chunk=512, frame=2048) as simulation:
            await simulation.stream(200, 1)
            began = simulation.clock()
            return (await simulation.stream(8000, 1))[0] - began

    timing = Timing(stages, 0.04, token=0.004)
    assert run_virtually(seconds()) < 1.15 * 8000 * timing.token


@pytest.mark.parametrize("seconds", [0.001, 100.0])
def test_chunks_are_whole_while_no_stream_runs(seconds: float) -> None:
    """The lengths of a prompt's chunks are a function of the prompt. The prefix cache wants the cut before the last."""
    drive = Drive(limits=replace(LONG, prefill_chunk=200, step_tokens=400))
    drive.scheduler.prompts.record_frame(chunk_frame(100, seconds))
    prompt = drive.submit(range(700), tokens=1)
    while not drive.tokens(prompt):
        drive.fill()
        drive.back()
    assert [chunk.width for chunk in chunks_of(drive.stage.seen)] == [128] * 5 + [32, 28]


# ---- the order of prompts


def test_the_oldest_prompt_gets_a_quarter_of_the_frames() -> None:
    """A long prompt is computed while short ones arrive without end."""
    drive = Drive(limits=LONG)
    long = drive.submit(range(400), tokens=1)
    for _ in range(300):
        drive.submit(range(8), tokens=1)
        drive.fill()
        drive.back()
        if any(isinstance(event, Finished) for event in drive.events[long]):
            break
    mine = [chunk.seq_id == long for chunk in chunks_of(drive.stage.seen)]
    assert sum(mine) == 50 and len(mine) < 4 * 50 + 10


def test_a_large_request_waits_for_its_memory_and_gets_it() -> None:
    """A request that needs most of the K/V memory is admitted while younger small ones arrive without end."""
    drive = Drive(limits=LONG, room=replace(ROOM, kv_tokens=400))
    drive.submit(tokens=40)
    large = drive.submit(range(300), tokens=80)
    for _ in range(300):
        drive.submit((1, 2), tokens=20)
        drive.fill()
        drive.back()
        if drive.tokens(large):
            return
    pytest.fail("the large request was never admitted")


# ---- clients


def test_the_client_with_the_fewest_sequences_is_next() -> None:
    """A free place goes to a client without a sequence before one that floods the queue."""
    drive = Drive(room=TWO)
    for _ in range(10):
        drive.submit(tokens=5, client="flood")
    drive.fill()
    one = drive.submit((4, 5), tokens=2, client="one")
    while not drive.tokens(one):
        drive.back()
        drive.fill()
    done = [i for i in range(10) if drive.events[i] and isinstance(drive.events[i][-1], Finished)]
    assert len(done) <= 3


def test_a_full_queue_refuses_the_client_that_fills_it() -> None:
    """A client that floods the queue learns when to return. Others keep places, and all that wait are served."""
    drive = Drive(limits=LONG, room=TWO)
    queued = [drive.submit(tokens=2, client="flood") for _ in range(31)]
    with pytest.raises(CapacityError, match="31 requests of this client are waiting") as caught:
        drive.submit(tokens=2, client="flood")
    assert caught.value.retry_after > 1
    queued += [drive.submit(tokens=2, client=name) for name in "ab"]
    with pytest.raises(CapacityError):
        drive.submit(tokens=2, client="flood")
    drive.run()
    assert all(drive.finished(i).reason == "length" for i in queued)
