"""Tests of the order of prompts, of their part of the time, and of the queue's fairness between clients."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import (
    FIRST_FRAME,
    SECONDS_ALONE,
    SECONDS_BESIDE_STREAMS,
    SHORTEST_FRAME,
    Limits,
    Prompts,
    check_queue,
    most_waiting,
)
from coordinator.schedule.request import Finished, GenerationRequest, PrefillProgress
from coordinator.schedule.scheduler import Scheduler
from coordinator.schedule.sequence import Sequence
from mtp.device import FrameLimits
from proto.errors import CapacityError
from proto.frame import Admit, Frame, Segment
from tests.support.protocol.scheduler_drive import ROOM, Drive, chunks_of
from tests.support.protocol.simulation import Simulation, Timing, run_virtually
from tests.support.stages.token_stages import plain

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


def test_the_pace_of_prompts_belongs_to_the_plan() -> None:
    """The frames of a new plan are as short as those of an unknown machine, because other machines may be slower."""
    drive = Drive(limits=Limits(context=1000))
    drive.scheduler.prompts.record_frame(chunk_frame(100, 0.001))
    drive.scheduler.reset(1, 2, ROOM, 0.0)
    assert drive.scheduler.prompts.expected_seconds(100) is None


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


@pytest.mark.parametrize(("places", "taken"), [(1, 1), (2, 2), (9, 8), (10, 9), (18, 16), (90, 80), (288, 256)])
def test_one_client_leaves_every_ninth_place_of_the_queue(places: int, taken: int) -> None:
    """A client fills eight ninths of an empty queue and no place more. Another one still gets the next place."""
    waiting: list[Sequence] = []

    def join(client: str) -> None:
        check_queue(waiting, places, client, 1)
        waiting.append(Sequence(len(waiting), GenerationRequest((1,), 1, client=client), 0.0))

    for _ in range(taken):
        join("flood")
    with pytest.raises(CapacityError):
        join("flood")
    assert most_waiting(places) == taken
    if taken < places:
        join("other")


# ---- pauses

SAVING = Limits(context=1000, prefill_chunk=64, step_tokens=256)
WORDS = tuple(i % 90 for i in range(150))


@pytest.mark.parametrize("prefix_bytes", [0, 10**5])
@pytest.mark.parametrize(("places", "stages", "mtp"), [(1, 1, "off"), (2, 1, "off"), (4, 2, "2"), (5, 2, "off")])
def test_one_client_never_holds_the_last_place(places: int, stages: int, mtp: str, prefix_bytes: int) -> None:
    """Another client has its first token after a few frames, at any size of the plan, and all texts are right.

    One sequence pauses for each request of the other client. It is computed again only if its state was not saved.
    """
    room = Capacity(places, 10_000, prefix_bytes, token_bytes=1)
    drive = Drive(stages, limits=SAVING, room=room, mtp=mtp)
    drive.frame_seconds = 0.1
    flood = [drive.submit((i, *WORDS), tokens=60, seed=i, client="flood") for i in range(places + 2)]
    drive.run_frames(30)
    other = drive.submit((5, 6), tokens=3, client="other")
    drive.run_frames(5 * stages)
    assert drive.tokens(other)
    drive.run()
    for i, seq_id in enumerate(flood):
        assert drive.tokens(seq_id) == plain((i, *WORDS), 60, i)
    admits = Counter(op.seq_id for f in drive.stage.seen for op in f.ops if isinstance(op, Admit))
    assert admits.total() == places + 4 and max(admits.values()) == 2
    chunks = sum(chunk.width for chunk in chunks_of(drive.stage.seen))
    assert (chunks == 151 * (places + 2) + 2 + 1) == bool(prefix_bytes)


def test_a_client_alone_keeps_all_places() -> None:
    """Nothing pauses while no other client waits, nor between clients with equal parts."""
    drive = Drive(room=TWO)
    for _ in range(4):
        drive.submit(tokens=20, client="a")
    drive.run()
    for client in "ab":
        for _ in range(2):
            drive.submit(tokens=20, client=client)
        drive.run_frames(4)
    drive.run()
    admitted = [op.seq_id for f in drive.stage.seen for op in f.ops if isinstance(op, Admit)]
    assert len(admitted) == 8 + 1, "b takes one of a's two places, and no other"


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("clients", [2, 3])
def test_clients_that_share_a_place_take_turns(clients: int, saved: bool) -> None:
    """All answers advance. Where the state is not saved, most of the frames still make new tokens."""
    room = Capacity(1, 1000, 10**5 if saved else 0, token_bytes=1)
    drive = Drive(limits=SAVING, room=room)
    drive.frame_seconds = 0.1
    drive.scheduler.prompts.record_frame(chunk_frame(100, 5.0))
    ids = [drive.submit((i, *WORDS), tokens=200, client=str(i)) for i in range(clients)]
    drive.run_frames(75 * clients)
    got = [len(drive.tokens(seq_id)) for seq_id in ids]
    assert min(got) > 15
    assert sum(got) > (30 if saved else 45) * clients
    drive.run()
    for i, seq_id in enumerate(ids):
        assert drive.tokens(seq_id) == plain((i, *WORDS), 200)


@pytest.mark.parametrize(
    ("flood", "other"),
    [((97, 97, 97, 97), 180), ((347, 47), 97), ((397,), 47), ((97, 97, 97, 97), 397)],
    ids=["two of four", "the large one of two", "the only one", "all of four"],
)
def test_a_client_gets_the_memory_that_one_client_holds(flood: tuple[int, ...], other: int) -> None:
    """K/V memory that answers of one client have reserved becomes free for another one, within its fair part."""
    drive = Drive(room=replace(ROOM, kv_tokens=400))
    drive.frame_seconds = 0.1
    for tokens in flood:
        drive.submit(tokens=tokens, client="flood")
    drive.run_frames(10)
    wanted = drive.submit((1, 2, 3), tokens=other, client="other")
    drive.run_frames(14)
    assert bool(drive.tokens(wanted)) == (other < 397)
    drive.run()
    assert len(drive.tokens(wanted)) == other


def test_two_clients_make_room_for_a_third_one() -> None:
    """The memory that a third client lacks may come from several clients with equal parts."""
    drive = Drive(room=replace(ROOM, kv_tokens=600))
    drive.frame_seconds = 0.1
    ids = [drive.submit((i, 1, 2), tokens=97, client="ab"[i % 2]) for i in range(6)]
    drive.run_frames(10)
    third = drive.submit((1, 2, 3), tokens=297, client="c")
    drive.run_frames(14)
    assert drive.tokens(third)
    drive.run()
    assert [drive.tokens(seq_id) for seq_id in ids] == [plain((i, 1, 2), 97) for i in range(6)]


def test_a_client_that_leaves_costs_no_place() -> None:
    """A sequence that is about to pause goes on if the other client leaves."""
    drive = Drive(stages=2, room=TWO)
    ids = [drive.submit((i, 2), tokens=40, client="flood") for i in range(2)]
    drive.run_frames(8)
    other = drive.submit(tokens=5, client="other")
    drive.fill()
    assert any(sequence.pausing for sequence in drive.scheduler.running.values())
    drive.scheduler.cancel_sequence(other)
    drive.run()
    assert [drive.tokens(seq_id) for seq_id in ids] == [plain((i, 2), 40) for i in range(2)]
    assert sum(isinstance(op, Admit) for f in drive.stage.seen for op in f.ops) == 2


@pytest.mark.parametrize("prefix_bytes", [0, 10**5])
def test_a_long_prompt_pauses_for_another_client(prefix_bytes: int) -> None:
    """A prompt that is computed gives up its place too. Its own tokens do not count as cached when it returns."""
    limits = replace(SAVING, prefill_chunk=32, step_tokens=32)
    drive = Drive(limits=limits, room=Capacity(1, 1000, prefix_bytes, token_bytes=1))
    drive.frame_seconds = 0.1
    long = drive.submit((*WORDS, *WORDS, *WORDS, *WORDS), tokens=5, client="flood")
    drive.run_frames(9)
    other = drive.submit((5, 6), tokens=3, client="other")
    drive.run_frames(8)
    assert drive.tokens(other) and not drive.tokens(long)
    drive.run()
    assert drive.tokens(long) == plain(WORDS * 4, 5)
    assert {event.cached for event in drive.events[long] if isinstance(event, PrefillProgress)} == {0}
    assert drive.finished(long).stats.cached_tokens == 0
    again = sum(chunk.width for chunk in chunks_of(drive.stage.seen)) - 600 - 2
    assert (again == 0) == bool(prefix_bytes)


async def first_tokens_beside_streams(
    places: int, stages: int, prompt: int, clients: int, prefix_bytes: int
) -> list[float]:
    """Run long streams of one client and short requests of others. Return the latter's seconds to the first token."""
    timing = Timing(stages, 0.1 / stages, token=0.002)
    room = Capacity(places, 2**20, prefix_bytes, token_bytes=1)
    async with Simulation(timing, chunk=64, frame=256, room=room) as simulation:
        firsts = []
        streams = [
            asyncio.create_task(simulation.stream(prompt, 150, i, client="flood")) for i in range(min(24, 14 * places))
        ]
        for i in range(6):
            await asyncio.sleep(2.0)
            asked = simulation.clock()
            others = (simulation.stream(9, 4, i, client=str(one)) for one in range(clients))
            firsts += [times[0] - asked for times in await asyncio.gather(*others)]
        times = await asyncio.gather(*streams)
        assert all(len(stream) == 150 for stream in times)
        return firsts


@pytest.mark.parametrize(
    ("places", "stages", "prompt", "clients", "prefix_bytes"),
    [
        (1, 1, 20, 1, 0),
        (1, 4, 20, 1, 10**5),
        pytest.param(2, 2, 20, 1, 0, marks=pytest.mark.thorough),
        (16, 1, 20, 1, 0),
        (16, 4, 20, 1, 10**5),
        (16, 1, 20, 3, 10**5),
        (16, 2, 900, 1, 10**5),
        pytest.param(16, 2, 900, 1, 0, marks=pytest.mark.thorough),
    ],
)
def test_a_short_request_waits_two_seconds_at_most(
    places: int, stages: int, prompt: int, clients: int, prefix_bytes: int
) -> None:
    """Beside 24 long streams or prompts of one client, others have their first tokens soon, again and again."""
    firsts = run_virtually(first_tokens_beside_streams(places, stages, prompt, clients, prefix_bytes))
    assert max(firsts) < 2.0 * clients
