"""The coordinator backs sequences up as often as failures suggest, and the next plan computes only what is missing."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from unittest.mock import patch

from coordinator.generation.backup import Backup
from coordinator.generation.backups import (
    CALM_PAUSE,
    MAX_IN_FLIGHT,
    MIN_NEW_TOKENS,
    STORM_PAUSE,
)
from coordinator.generation.limits import Limits
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.request import GenerationRequest, TokenChunk
from coordinator.generation.scheduler import Scheduler
from coordinator.planning.capacity import Capacity
from mtp.depth.controller import Controller, MtpMode
from proto.backup import PIECE_BYTES, LayerState, PieceJoiner, split
from proto.errors import WorkerLostError
from proto.frame import Frame, Op
from proto.operation import BackUp, RestoreBackup, RestorePrefix
from tests.bench.storm import FailingSource
from tests.support.protocol.scheduler_drive import Drive
from tests.support.protocol.simulation import Timing, run_virtually
from tests.support.stages.fake_last_stage import FakeLastStage, plain

FEW = 4


def backups_of(frames: list[Frame]) -> list[BackUp]:
    """Return the backups that frames make."""
    return [op for frame in frames for op in frame.ops if isinstance(op, BackUp)]


def run(drive: Drive, seconds: float) -> list[Frame]:
    """Run a drive for `seconds` of its clock, a second for each returned frame. Return the frames sent."""
    first, until = len(drive.stage.seen), drive.now + seconds
    drive.fill()
    while drive.stage.in_flight and drive.now < until:
        drive.back()
        drive.fill()
    return drive.stage.seen[first:]


def test_a_new_plan_computes_what_the_backup_lacks() -> None:
    """After a change of plan, a sequence continues from its backup, and its tokens are those of the whole answer."""
    drive = Drive(stages=2, depth=2)
    prompt = range(1, 90)
    seq_id = drive.submit(prompt, 150)
    run(drive, 60)
    kept = drive.scheduler.backups.tokens_of(seq_id)
    assert kept > len(prompt)
    drive.new_plan(FakeLastStage(1), stages=3)
    drive.run()
    ops = [op for frame in drive.stage.seen for op in frame.ops]
    assert RestoreBackup(seq_id, kept) in ops
    first = next(s for frame in drive.stage.seen for s in frame.segments)
    assert first.position == kept
    assert drive.tokens(seq_id) == plain(prompt, 150)
    assert drive.scheduler.backups.kept == {}, "an answer that has ended has no backup"


def test_backups_pause_in_proportion_to_their_transfer() -> None:
    """A calm cluster makes few backups, and after a failure it makes more."""
    drive = Drive()
    drive.backup_seconds = 10.0
    drive.submit(range(40), 800)
    calm = backups_of(run(drive, 10 * CALM_PAUSE))
    drive.scheduler.backups.record_failure(drive.now)
    stormy = backups_of(run(drive, 10 * STORM_PAUSE * 5))
    assert len(calm) == 1
    assert 2 <= len(stormy) <= 5


def test_the_least_saved_sequence_is_backed_up_first() -> None:
    """Sequences take turns, and no backup saves fewer than MIN_NEW_TOKENS tokens."""
    drive = Drive()
    drive.backup_seconds = 0.5 / CALM_PAUSE
    ids = [drive.submit(range(5 + i), 120) for i in range(3)]
    made = backups_of(run(drive, 200))
    for seq_id in ids:
        starts = [op.start for op in made if op.seq_id == seq_id]
        assert len(starts) > 1
        assert all(b - a >= MIN_NEW_TOKENS for a, b in pairwise(starts))


def test_sequences_are_backed_up_while_others_wait_for_their_transfer() -> None:
    """Backups of several sequences are in flight, each of another one. A large one is alone."""
    drive = Drive(stages=3)
    for i in range(6):
        drive.submit(range(60 + i), 40)
    most = 0
    with patch("coordinator.generation.backups.CALM_PAUSE", 0.0):
        while drive.fill() or drive.stage.in_flight:
            backups = drive.scheduler.backups
            most = max(most, len(backups.in_flight))
            frames = [made.frame for made in backups.in_flight.values()]
            assert len(set(frames)) == len(frames), "a frame makes one backup"
            drive.back()
        assert 1 < most <= MAX_IN_FLIGHT
        drive.submit(range(60), 40)
        drive.submit(range(61), 40)
        with patch("coordinator.generation.backups.BYTES_IN_FLIGHT", 0):
            while drive.fill() or drive.stage.in_flight:
                assert len(drive.scheduler.backups.in_flight) <= 1
                drive.back()


def test_the_oldest_answer_is_rebuilt_first() -> None:
    """After a change of plan the oldest answer continues while younger ones still wait for their prefill."""
    drive = Drive()
    ids = [drive.submit(range(10), 30) for _ in range(FEW)]
    run(drive, 12)
    assert all(drive.tokens(seq_id) for seq_id in ids)
    before = {seq_id: len(drive.tokens(seq_id)) for seq_id in ids}
    drive.scheduler.backups.record_failure(drive.now)
    drive.new_plan(FakeLastStage(1))
    while len(drive.tokens(ids[0])) == before[ids[0]]:
        drive.fill()
        drive.back()
    assert [len(drive.tokens(i)) for i in ids[1:]] == [before[i] for i in ids[1:]]
    drive.run()
    assert all(drive.tokens(seq_id) == plain(range(10), 30) for seq_id in ids)


def test_a_client_that_leaves_takes_its_backup() -> None:
    """A sequence that is cancelled while its backup waits on the stages leaves nothing there."""
    drive = Drive()
    seq_id = drive.submit(range(60), 40)
    run(drive, 30)
    assert drive.scheduler.backups.tokens_of(seq_id)
    drive.new_plan(FakeLastStage(1))
    drive.scheduler.cancel_sequence(seq_id)
    drive.run()
    assert drive.stage.received == {}
    assert drive.scheduler.backups.kept == {}


def test_backups_stay_within_their_limit() -> None:
    """The backup of the youngest sequence is dropped when the memory for backups is full."""
    drive = Drive()
    drive.scheduler.backups.limit = 600
    ids = [drive.submit(range(50), 100) for _ in range(3)]
    with patch("coordinator.generation.backups.CALM_PAUSE", 0.0):
        run(drive, 60)
    assert 0 < drive.scheduler.backups.nbytes <= 600
    assert drive.scheduler.backups.tokens_of(ids[0])
    assert not drive.scheduler.backups.tokens_of(ids[-1])


def test_pieces_join_to_the_states() -> None:
    """The states of a backup survive the transfer in pieces, and a state that is replaced keeps its newest bytes."""
    states = [LayerState(0, True, b"a" * (PIECE_BYTES + 1)), LayerState(1, False, b"")]
    joiner = PieceJoiner(limit=2 * PIECE_BYTES)
    for piece in split(states):
        joiner.add_piece(piece)
    assert joiner.states == states
    backup = Backup()
    backup.add_states(8, [LayerState(0, True, b"a"), LayerState(1, False, b"b")])
    backup.add_states(9, [LayerState(0, True, b"c"), LayerState(1, False, b"d")])
    assert [state.data for state in backup.states] == [b"a", b"c", b"d"]
    assert backup.tokens == 9


PREFIX_ROOM = Capacity(sequences=2, kv_tokens=10_000, prefix_bytes=2**20, token_bytes=1)
PROMPT, PREFIX = tuple(range(200)), 192
"""A prompt, and the tokens of it that the stages save as a prefix entry."""


def ops_of(frames: list[Frame]) -> list[Op]:
    """Return the operations of frames."""
    return [op for frame in frames for op in frame.ops]


def test_a_prompt_is_not_computed_again_by_the_next_plan() -> None:
    """Its backup outlives its sequence and its plan. A new sequence restores it, and the stages save it again."""
    drive = Drive(room=PREFIX_ROOM)
    drive.submit(PROMPT, 5)
    drive.run()
    assert drive.scheduler.backups.kept == {}
    drive.new_plan(FakeLastStage(1), room=PREFIX_ROOM)
    seq_id = drive.submit(PROMPT, 50)
    kept = drive.scheduler.backups.kept[seq_id]
    assert kept.tokens == PREFIX
    drive.stage.receive_backup(seq_id, kept.states)
    drive.scheduler.waiting[0].await_backup(kept.tokens)
    drive.run()
    restored = ops_of(drive.stage.seen)
    assert RestoreBackup(seq_id, PREFIX) in restored
    assert next(s for frame in drive.stage.seen for s in frame.segments).position == PREFIX
    assert drive.tokens(seq_id) == plain(PROMPT, 50)
    backed_up = [op for op in restored if isinstance(op, BackUp)]
    assert all(op.start >= PREFIX for op in backed_up), "the coordinator has the prefix"
    again = drive.submit(PROMPT, 5)
    drive.run()
    ops = ops_of(drive.stage.seen)
    assert any(isinstance(op, RestorePrefix) and op.seq_id == again for op in ops)


async def tokens_of(loop: GenerationLoop, request: GenerationRequest) -> list[int]:
    """Return the tokens of the answer to `request`."""
    events = [event async for event in loop.generate(request)]
    return [token for e in events if isinstance(e, TokenChunk) for token in e.tokens]


def test_the_loop_restores_the_prompt_of_a_new_request() -> None:
    """A request after a change of plan computes only the end of a known prompt. One that leaves leaves no backup."""

    async def work() -> tuple[list[int], list[Frame]]:
        """Ask twice, and let the plan fail in between."""
        clock = asyncio.get_running_loop().time
        source = FailingSource(Timing(2), every=1e6, down=0.1, backups=True, room=PREFIX_ROOM)
        scheduler = Scheduler(Limits(context=4096), Controller(MtpMode(0)))
        loop = GenerationLoop(source, scheduler, clock)
        await loop.start()
        request = GenerationRequest(PROMPT, 20)
        await tokens_of(loop, request)
        assert source.present is not None
        source.present.fail(WorkerLostError("a fault"))
        await asyncio.sleep(1.0)
        leaving = asyncio.create_task(tokens_of(loop, request))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert source.present.last.received == {}, "the stages keep no backup of a client that left"
        tokens = await tokens_of(loop, request)
        await loop.close()
        return tokens, source.present.last.seen

    tokens, seen = run_virtually(work())
    assert tokens == plain(PROMPT, 20)
    assert min(s.position for frame in seen for s in frame.segments) == PREFIX


def test_prefixes_leave_room_for_running_answers() -> None:
    """Backups of prompts are dropped before those of running sequences, the least recently used first."""
    drive = Drive(room=PREFIX_ROOM)
    drive.scheduler.backups.limit = 2500
    prompts = [tuple(range(i, i + 150)) for i in range(6)]
    backups = drive.scheduler.backups
    with patch("coordinator.generation.backups.CALM_PAUSE", 0.0):
        for prompt in prompts:
            drive.submit(prompt, 40)
            drive.run()
            assert backups.nbytes <= 2500
    assert 0 < len(backups.prefixes.kept) < len(prompts)
    assert prompts[0][:128] not in backups.prefixes.kept
