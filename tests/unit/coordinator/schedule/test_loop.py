"""Tests of the generation loop over pipelines that fail and change, in virtual time, and of a GPU's watchdog."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from unittest.mock import AsyncMock, MagicMock, patch

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline, PipelineSource
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import SHORTEST_CHUNK, Limits
from coordinator.schedule.loop import MAX_FAILURES, GenerationLoop, is_gpu_timeout
from coordinator.schedule.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    TokenChunk,
    generate,
)
from coordinator.schedule.scheduler import FrameOutcome, Scheduler
from coordinator.status.cluster_status import ClusterStatus
from proto.control import Rollback
from proto.errors import ClusterError, NotReadyError, StaleEpochError, WorkerLostError
from proto.frame import Commit, Frame
from tests.support.protocol.simulation import SimulatedPipeline, Simulation, Timing, run_virtually
from tests.support.stages.token_stages import plain

PROMPT = (1, 2, 3)


class Failing:
    """A source whose first pipelines fail with the given errors as soon as they are acquired."""

    def __init__(self, errors: list[ClusterError]) -> None:
        self.errors = errors
        self.lost = 0

    async def acquire(self) -> Pipeline:
        pipeline = SimulatedPipeline(Timing(2), epoch=self.lost)
        pipeline.last.engine.epoch = self.lost
        if self.lost < len(self.errors):
            pipeline.fail(self.errors[self.lost])
        return pipeline

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        self.lost += 1


class Breaking(Failing):
    """A source whose only pipeline fails, and which raises when the loop asks for another."""

    async def acquire(self) -> Pipeline:
        if self.lost:
            raise RuntimeError("out of memory")
        return await super().acquire()


class Forgetful(Failing):
    """A source with a bug in its answer to failures."""

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        super().report_failure(pipeline, error)
        raise ZeroDivisionError("a bug")


def test_a_bug_in_the_end_of_a_plan_does_not_end_the_loop() -> None:
    """The next plan continues the request, which would wait without end."""
    assert told(run_virtually(heard(Forgetful([WorkerLostError("gone")])))) == plain(PROMPT, 10)


class Telling(SimulatedPipeline):
    """A pipeline that records rollbacks and frames in their order."""

    def __init__(self, sent: list[Rollback | Frame]) -> None:
        super().__init__(Timing(1))
        self.last.engine.epoch, self.sent = 0, sent

    def broadcast_rollback(self, rollback: Rollback) -> None:
        self.sent.append(rollback)

    def send_frame(self, frame: Frame) -> None:
        self.sent.append(frame)
        super().send_frame(frame)


def test_every_rejection_is_signalled_before_the_next_frame() -> None:
    """The header commits a window again, so no token shows a signal that is missing or late."""
    sent: list[Rollback | Frame] = []
    source: PipelineSource = MagicMock(acquire=AsyncMock(side_effect=lambda: Telling(sent)))
    scheduler = Scheduler(Limits(100), Controller(MtpMode(3)))
    assert told(run_virtually(heard(source, scheduler))) == plain(PROMPT, 10)
    widths = {s.window: s.width for f in sent if isinstance(f, Frame) for s in f.segments}
    commits = [(op, sent[i - 1]) for i, f in enumerate(sent) if isinstance(f, Frame) for op in f.ops]
    cut = [
        (op.window, widths[op.window] - op.accepted_length, before)
        for op, before in commits
        if isinstance(op, Commit) and op.accepted_length < widths[op.window]
    ]
    assert len(cut) > 1
    for window, trim, before in cut:
        assert before == Rollback(0, window, trim)


async def events(errors: list[ClusterError]) -> list[GenerationEvent]:
    """Return all events of one request."""
    return await heard(Failing(errors))


def told(found: list[GenerationEvent]) -> list[int]:
    return [token for event in found if isinstance(event, TokenChunk) for token in event.tokens]


async def heard(source: PipelineSource, scheduler: Scheduler | None = None) -> list[GenerationEvent]:
    scheduler = scheduler or Scheduler(Limits(100), Controller(MtpMode(1)))
    loop = GenerationLoop(source, scheduler, asyncio.get_running_loop().time)
    await loop.start()
    try:
        return [event async for event in generate(loop, GenerationRequest(PROMPT, 10))]
    finally:
        await loop.close()


@pytest.mark.parametrize(
    "errors",
    [
        [WorkerLostError("gone")] * (MAX_FAILURES - 1),
        [StaleEpochError("replaced")] * 3 * MAX_FAILURES,
        [StaleEpochError("replaced"), WorkerLostError("gone")] * (MAX_FAILURES - 1),
    ],
)
def test_a_request_outlives_plans(errors: list[ClusterError]) -> None:
    """A few failed plans, and any number of replaced ones, change no token."""
    found = run_virtually(events(errors))
    assert told(found) == plain(PROMPT, 10)


@pytest.mark.parametrize(("error", "count"), [(StaleEpochError("replaced"), 0), (WorkerLostError("gone"), 1)])
def test_a_replaced_plan_is_no_recovery(error: ClusterError, count: int) -> None:
    """Only a failure is counted, shortens the frames of prompts and lets backups follow each other sooner."""
    scheduler = Scheduler(Limits(100), Controller(MtpMode(1)))

    async def work() -> int:
        """Answer one request. Return the recoveries that the status shows."""
        loop = GenerationLoop(Failing([error]), scheduler, asyncio.get_running_loop().time)
        await loop.start()
        [event async for event in generate(loop, GenerationRequest(PROMPT, 10))]
        await loop.close()
        return loop.status().recoveries

    assert run_virtually(work()) == count
    assert scheduler.backups.stormy == bool(count)


def test_a_request_that_no_plan_survives_ends() -> None:
    """After MAX_FAILURES failed plans the request ends with an error, and the next plan serves."""
    found = run_virtually(events([WorkerLostError("gone")] * MAX_FAILURES))
    (end,) = [event for event in found if isinstance(event, Finished)]
    assert end.reason == "error"
    assert "in a row" in (end.error or "")


def test_a_source_that_raises_ends_the_waiting_requests() -> None:
    """Any exception of the source ends the waiting requests. No request waits without end."""
    (end,) = run_virtually(heard(Breaking([WorkerLostError("gone")])))
    assert isinstance(end, Finished)
    assert end.reason == "error"


class Careless(Scheduler):
    """A scheduler that raises once, on the frame after the first that returned."""

    returned = 0

    def apply_outcomes(self, frame: Frame, now: float) -> FrameOutcome:
        self.returned += 1
        return super().apply_outcomes(frame, now)

    def next_frame(self, now: float) -> Frame | None:
        if self.returned == 1:
            self.returned += 1
            raise KeyError("a bug")
        return super().next_frame(now)


def test_a_loop_that_raises_ends_its_requests_and_continues() -> None:
    """After a bug between a returned frame and the next one, the client gets the tokens, then the error."""

    async def two() -> tuple[list[GenerationEvent], list[GenerationEvent]]:
        scheduler = Careless(Limits(100), Controller(MtpMode(0)))
        loop = GenerationLoop(Failing([]), scheduler, asyncio.get_running_loop().time)
        await loop.start()
        request = GenerationRequest(PROMPT, 10)
        try:
            first = [event async for event in generate(loop, request)]
            return first, [event async for event in generate(loop, request)]
        finally:
            await loop.close()

    first, second = run_virtually(two())
    assert told(first) == plain(PROMPT, 10)[:1]
    assert isinstance(first[-1], Finished)
    assert first[-1].reason == "error"
    assert told(second) == plain(PROMPT, 10)


def test_a_finished_request_gets_its_end_although_the_frame_breaks_the_loop() -> None:
    """A client gets its last event although the frame that carries it breaks the loop.

    The frame carries two sequences. The first one ends with its last token and leaves the scheduler. The outcome of the
    second one is invalid.
    """

    async def last_events() -> list[GenerationEvent]:
        scheduler = Scheduler(Limits(100), Controller(MtpMode(0)))
        loop = GenerationLoop(Failing([]), scheduler, asyncio.get_running_loop().time)
        await loop.start()
        assert loop.pipeline is not None
        receive = loop.pipeline.receive_frame

        async def broken() -> Frame:
            frame = await receive()
            ending = scheduler.running.get(0)
            if len(frame.segments) < 2 or ending is None or ending.remaining > 1:
                return frame
            first, second = frame.outcomes
            return replace(frame, outcomes=(first, replace(second, token=None)))

        async def last(number: int) -> GenerationEvent:
            async with asyncio.timeout(3600):
                request = GenerationRequest((1, 2, 3 + number), 5 + 3 * number)
                return [event async for event in generate(loop, request)][-1]

        with patch.object(loop.pipeline, "receive_frame", broken):
            found = await asyncio.gather(*map(last, range(4)))
        await loop.close()
        return found

    assert all(isinstance(event, Finished) for event in run_virtually(last_events()))


def test_a_status_shows_the_requests_and_the_plan() -> None:
    """A status is the state of the loop at one moment, and does not change afterwards."""

    async def statuses() -> list[ClusterStatus]:
        source = Failing([])
        scheduler = Scheduler(Limits(100, prefill_chunk=2), Controller(MtpMode(1)))
        loop = GenerationLoop(source, scheduler, asyncio.get_running_loop().time)
        found = [loop.status()]
        await loop.start()
        request = GenerationRequest(PROMPT, 10, request_id="r")
        async for _ in generate(loop, request):
            found.append(loop.status())
        await loop.close()
        return [*found, loop.status()]

    before, *during, after = run_virtually(statuses())
    assert (before.ready, after.ready) == (False, False)
    assert all(one.ready and one.mtp == "1" for one in during)
    assert during[0].running == 1 and after.running == 0
    prompts = [prompt for one in during for prompt in one.prefilling]
    assert {(one.request_id, one.total) for one in prompts} == {("r", len(PROMPT))}
    assert during[0].kv_tokens == len(PROMPT) + 10 and after.kv_tokens == 0


def test_a_request_before_the_first_plan_hears_what_the_server_waits_for() -> None:
    """The error has the words of the log. Without a cause it says that the server starts or ends."""
    for cause, words in (
        ("waiting for workers: 1 of 2", "waiting for workers: 1 of 2"),
        ("", "start"),
    ):
        scheduler = Scheduler(Limits(context=64), Controller(MtpMode(0)))
        loop = GenerationLoop(Failing([]), scheduler, describe_wait=partial(str, cause))
        with pytest.raises(NotReadyError, match=words):
            loop.submit(GenerationRequest((1,), 1), print)


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


# ---- clients that leave while their prompt is computed

LONG = tuple(i * i % 997 for i in range(7570))
KEEPING = Capacity(sequences=4, kv_tokens=2**20, prefix_bytes=12_000, token_bytes=1)


async def ask_until(loop: GenerationLoop, seconds: float, prompt: tuple[int, ...] = LONG) -> list[GenerationEvent]:
    """Return the events of a request whose client leaves after `seconds`."""
    found: list[GenerationEvent] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for event in generate(loop, GenerationRequest(prompt, 10)):
                found.append(event)
    return found


def computed(found: list[GenerationEvent]) -> list[PrefillProgress]:
    return [event for event in found if isinstance(event, PrefillProgress)]


@pytest.mark.parametrize("stages", [1, 3])
def test_a_prompt_that_its_client_left_goes_on(stages: int) -> None:
    """The same prompt again starts from the last whole chunk, so deadlines make progress until the answer comes."""

    async def work() -> list[list[GenerationEvent]]:
        timing = Timing(stages, token=0.001)
        async with Simulation(timing, chunk=512, room=KEEPING) as simulation:
            return [await ask_until(simulation.loop, 3.2) for _ in range(3)]

    first, *others = run_virtually(work())
    left = computed(first)[-1].done
    assert 2000 < left < 3500 and not told(first)
    assert computed(others[0])[0].cached >= left
    assert computed(others[1])[0].cached >= computed(others[0])[-1].done
    assert told(others[-1]) == plain(LONG, 10)


def test_a_left_prompt_replaces_its_own_entry() -> None:
    """A prompt that is left again and again keeps one entry, and the entries of another prompt stay."""

    async def work() -> tuple[list[int], list[GenerationEvent]]:
        async with Simulation(Timing(2, token=0.001), chunk=512, room=KEEPING) as simulation:
            await ask_until(simulation.loop, 10.0, LONG[::-1][:2000])
            for _ in range(5):
                await ask_until(simulation.loop, 1.2)
            kept = [entry.tokens for entry in simulation.scheduler.prefixes.entries.values()]
            return kept, await ask_until(simulation.loop, 1.0, LONG[::-1][:2000])

    kept, other = run_virtually(work())
    assert len(kept) == 3, kept
    assert computed(other)[0].cached == 1984


def test_a_long_prompt_has_entries_on_the_way() -> None:
    """Another prompt with the same beginning finds most of what is computed. Such an entry drops none of others."""

    async def work(prefix_bytes: int) -> tuple[int, int, list[int]]:
        room = replace(KEEPING, prefix_bytes=prefix_bytes)
        async with Simulation(Timing(1, token=0.001), chunk=512, room=room) as simulation:
            await ask_until(simulation.loop, 10.0, LONG[::-1][:3000])
            first = asyncio.create_task(ask_until(simulation.loop, 9.0))
            await asyncio.sleep(5.0)
            entries = simulation.scheduler.prefixes.entries.values()
            held = [entry.tokens for entry in entries]
            second = await ask_until(simulation.loop, 4.0, (*LONG[:4500], 5, 6))
            done = computed(await first)
            return computed(second)[0].cached, done[-1].done, held

    cached, done, held = run_virtually(work(12_000))
    assert cached >= 4096 and done == len(LONG)
    assert len(held) == 3, "one entry of each text, and one on the way"
    assert run_virtually(work(7000))[2][:2] == held[:2], "without room the entries of others stay"
