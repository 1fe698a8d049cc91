"""The coordinator backs sequences up as often as failures suggest, and the next plan computes only what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.planning.capacity import Capacity
from coordinator.schedule.admission import Limits
from coordinator.schedule.backups import CALM_PAUSE, FIRST_PAUSE, HOLD_SECONDS, SPARED_SECONDS, STORM_PAUSE
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import GenerationRequest, TokenChunk, generate
from coordinator.schedule.scheduler import Scheduler
from coordinator.schedule.sequence import MOST_RESTORES
from proto.backup import BackupTooLargeError, LayerState, ReceivedStates
from proto.errors import ClusterError, NotReadyError, ProtocolError, WorkerLostError
from proto.frame import Admit, BackUp, Frame, Op, RestoreBackup
from tests.support.protocol.scheduler_drive import Drive
from tests.support.protocol.simulation import (
    ROOM,
    OnePipeline,
    SimulatedPipeline,
    Timing,
    run_virtually,
)
from tests.support.stages.token_stages import FakeLastStage, plain

FEW = 4

TRANSFER = 0.05
"""Seconds of the transfer of a backup, besides its wait for the engine."""


@dataclass
class BackedPipeline(SimulatedPipeline):
    """A simulated pipeline whose stages transfer backups, each in `transfer` seconds."""

    makes_backups: bool = True
    transfer: float = TRANSFER

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence."""
        found = self.last.take_backup(seq_id)
        if found is None:
            raise NotReadyError("the sequence has ended")
        await asyncio.sleep(self.transfer)
        return ReceivedStates(found.length, found.states, TRANSFER)

    async def write_backup(self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]) -> None:
        """Keep a backup until the sequence is admitted."""
        await asyncio.sleep(TRANSFER)
        self.last.receive_backup(seq_id, states)


@dataclass
class FailingSource:
    """A source whose pipelines fail `every` seconds. The next one is ready `down` seconds after a failure."""

    timing: Timing
    every: float
    down: float
    backups: bool
    room: Capacity = ROOM
    transfer: float = TRANSFER
    epoch: int = 0
    present: SimulatedPipeline | None = None
    kind: type[BackedPipeline] = BackedPipeline

    async def acquire(self) -> Pipeline:
        """Return the next pipeline."""
        if self.epoch:
            await asyncio.sleep(self.down)
        self.epoch += 1
        last = FakeLastStage(self.epoch)
        self.present = self.kind(
            self.timing,
            last,
            self.epoch,
            self.room,
            makes_backups=self.backups,
            transfer=self.transfer,
        )
        return self.present

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        """Forget the failed pipeline."""
        self.present = None


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


def test_a_short_answer_has_no_backup_in_a_calm_cluster() -> None:
    """One that runs for less than SPARED_SECONDS is computed again, unless a failure came before."""
    spared = []
    for stormy in (False, True):
        drive = Drive()
        drive.submit(range(100), 20)
        drive.scheduler.next_frame(drive.now)
        (sequence,) = drive.scheduler.running.values()
        sequence.scheduled_tokens = 64
        if stormy:
            drive.scheduler.backups.record_failure(0.0)
        for later in (0.9 * SPARED_SECONDS, 1.1 * SPARED_SECONDS):
            drive.scheduler.backups.choose_due([sequence], sequence.scheduled_at + later)
            spared.append(drive.scheduler.backups.due is None)
    assert spared == [True, False, False, False]


def test_a_slow_backup_waits_until_the_answer_is_worth_it() -> None:
    """A transfer of 10 bytes has taken 2 seconds. A backup of 64 tokens has 4 + 32 bytes, and waits for 9 times 7.2."""
    drive = Drive()
    backups = drive.scheduler.backups
    backups.begin_backup(7, 12, 0)
    made = backups.in_flight
    assert made is not None
    states = [LayerState(0, False, b"4444"), LayerState(1, True, b"666666")]
    backups.complete_backup(made, 12, states)
    backups.end_backup(made, 2.0, -2.0 * CALM_PAUSE)
    drive.submit(range(100), 20)
    drive.scheduler.next_frame(drive.now)
    (sequence,) = drive.scheduler.running.values()
    sequence.scheduled_tokens = 64
    due = []
    for later in (7 * FIRST_PAUSE, 8 * FIRST_PAUSE):
        backups.choose_due([sequence], later)
        due.append(backups.due is not None)
    assert due == [False, True]


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
    assert drive.stage.backups.received == {}
    assert drive.scheduler.backups.kept == {}


@patch("coordinator.schedule.backups.CALM_PAUSE", 0.0)
@patch("coordinator.schedule.backups.MIN_NEW_TOKENS", 4)
def test_backups_above_their_limit_restore_no_wrong_tokens() -> None:
    """The youngest sequences lose their backups, also while the next part is in flight. All answers stay the same."""
    for limit in range(500, 1000, 100):
        drive = Drive(stages=3)
        backups = drive.scheduler.backups
        backups.limit = limit
        asked = {drive.submit(range(i, 60 + i), 200): range(i, 60 + i) for i in range(2)}
        most = 0
        while len(backups.kept) >= most:
            run(drive, 1)
            most = max(most, len(backups.kept))
            assert backups.nbytes <= limit
        assert min(backups.kept) == 0, "the oldest sequence keeps its backup"
        run(drive, 5)
        drive.new_plan(FakeLastStage(1), stages=3)
        drive.run()
        for seq_id, prompt in asked.items():
            assert drive.tokens(seq_id) == plain(prompt, 200)


def test_a_sequence_without_room_for_its_backup_is_not_backed_up_again() -> None:
    """A link carries no backup that would be dropped, until an older sequence has ended."""
    drive = Drive()
    drive.scheduler.backups.limit = 600
    with patch("coordinator.schedule.backups.CALM_PAUSE", 0.0):
        drive.submit(range(60), 60)
        drive.submit(range(60), 200)
        youngest = drive.submit(range(60), 200)
        run(drive, 100)
        made = [op for op in backups_of(drive.stage.seen) if op.seq_id == youngest]
        assert len(made) <= 2
        drive.run()
    assert len([op for op in backups_of(drive.stage.seen) if op.seq_id == youngest]) > len(made)


def test_an_answer_that_is_too_large_leaves_the_room_to_others() -> None:
    """It loses its backup when that alone exceeds the limit, and the younger ones have theirs until they end."""
    drive = Drive()
    drive.scheduler.backups.limit = 1500
    kept = drive.scheduler.backups.kept
    with patch("coordinator.schedule.backups.CALM_PAUSE", 0.0):
        large = drive.submit(range(60), 900)
        run(drive, 600)
        assert large in drive.scheduler.running and large not in kept
        others = [drive.submit(range(60), 100) for _ in range(2)]
        run(drive, 60)
        assert kept.keys() == {*others}
        made = backups_of(drive.stage.seen)
        drive.run()
    assert drive.tokens(large) == plain(range(60), 900)
    last = max(i for i, op in enumerate(made) if op.seq_id == large)
    assert all(op.seq_id in others for op in made[last + 1 :]) and len(made) > last + 2


@dataclass
class FailingReads(BackedPipeline):
    """A pipeline whose backups all fail with `error`."""

    error: ClusterError = field(default_factory=lambda: ProtocolError("no backup today"))
    reads: int = 0

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Refuse the transfer after its time."""
        self.reads += 1
        await asyncio.sleep(self.transfer)
        raise self.error


@pytest.mark.parametrize(("error", "most"), [(ProtocolError("not today"), 4), (BackupTooLargeError("too large"), 1)])
def test_a_transfer_that_fails_is_not_repeated_at_once(error: ClusterError, most: int) -> None:
    """It takes its share of a link, like one that arrives. One that is too large is never repeated."""

    async def work() -> int:
        """Answer one request. Return the number of transfers."""
        pipeline = FailingReads(Timing(1), FakeLastStage(1), 1, ROOM, error=error)
        scheduler = Scheduler(Limits(context=4096), Controller(MtpMode(0)))
        clock = asyncio.get_running_loop().time
        loop = GenerationLoop(OnePipeline(pipeline), scheduler, clock)
        await loop.start()
        await tokens_of(loop, GenerationRequest(PROMPT, 300))
        await loop.close()
        return pipeline.reads

    assert 1 <= run_virtually(work()) <= most, "in 4 seconds"


class RefusingPipeline(BackedPipeline):
    """A pipeline that fails when a sequence starts from a backup."""

    def send_frame(self, frame: Frame) -> None:
        """Refuse backups."""
        if any(isinstance(op, RestoreBackup) for op in frame.ops):
            refusal = ProtocolError("the backup does not fit")
            self._loop.call_later(1.5 * self.timing.step, self.fail, refusal)
        super().send_frame(frame)


def test_a_backup_that_fails_plans_is_given_up() -> None:
    """A later plan computes everything, so the answer goes on, and so does another one, which returns frames before."""

    async def work() -> tuple[list[list[int]], int]:
        """Answer two requests while a pipeline fails. Return their tokens and the number of plans."""
        source = FailingSource(Timing(1), 1e6, 0.1, backups=True, kind=RefusingPipeline, transfer=0.2)
        scheduler = Scheduler(Limits(context=4096), Controller(MtpMode(0)))
        loop = GenerationLoop(source, scheduler, asyncio.get_running_loop().time)
        await loop.start()
        asked = [GenerationRequest(PROMPT, 900), GenerationRequest(PROMPT[:90], 100)]
        answers = [asyncio.create_task(tokens_of(loop, asked[0]))]
        await asyncio.sleep(7.4)  # the next backup is almost due, so the other answer goes first
        answers.append(asyncio.create_task(tokens_of(loop, asked[1])))
        await asyncio.sleep(0.1)
        assert list(scheduler.backups.kept) == [0]
        assert source.present is not None
        source.present.fail(WorkerLostError("a fault"))
        tokens = [await answer for answer in answers]
        await loop.close()
        return tokens, source.epoch

    tokens, plans = run_virtually(work())
    assert tokens == [plain(PROMPT, 900), plain(PROMPT[:90], 100)]
    assert plans == 2 + MOST_RESTORES


async def interrupted(
    source: FailingSource, asked: list[GenerationRequest], leaves: bool = False
) -> tuple[list[list[int]], list[int], list[int]]:
    """Let a plan fail once `asked` have backups. Return all answers, and what the next plan admits and restores."""
    scheduler = Scheduler(Limits(context=4096), Controller(MtpMode(0)))
    loop = GenerationLoop(source, scheduler, asyncio.get_running_loop().time)
    await loop.start()
    answers = [asyncio.create_task(tokens_of(loop, one)) for one in asked]
    await asyncio.sleep(7.4)
    assert source.present is not None and scheduler.backups.kept
    source.backups = False
    source.present.fail(WorkerLostError("a fault"))
    if leaves:
        await asyncio.sleep(0.1 + TRANSFER / 2)
        answers[0].cancel()
        await asyncio.gather(answers[0], return_exceptions=True)
    found = [await one for one in answers[leaves:]]
    await asyncio.sleep(1.0)
    await loop.close()
    assert source.present.last.backups.received == {}, "no state is left of a client that left"
    ops = ops_of(source.present.last.seen)
    admitted = [op.seq_id for op in ops if isinstance(op, Admit)]
    return found, admitted, [op.seq_id for op in ops if isinstance(op, RestoreBackup)]


def test_an_answer_keeps_its_place_while_its_backup_is_written() -> None:
    """A request that waits for the only place does not take it meanwhile."""
    source = FailingSource(Timing(1), 1e6, 0.1, backups=True, room=Capacity(1, kv_tokens=10_000, prefix_bytes=0))
    asked = [GenerationRequest(PROMPT, 900), GenerationRequest(PROMPT[:90], 100)]
    tokens = [plain(PROMPT, 900), plain(PROMPT[:90], 100)]
    assert run_virtually(interrupted(source, asked)) == (tokens, [0, 1], [0])


@pytest.mark.parametrize("leaves", [False, True])
def test_a_plan_that_makes_no_backups_restores_those_of_others(leaves: bool) -> None:
    """A coordinator that serves alone restores what its workers made, but for a client that has left."""
    source = FailingSource(Timing(1), 1e6, 0.1, backups=True)
    asked = [GenerationRequest(PROMPT[first:], 900) for first in (0, 1)]
    tokens = [plain(PROMPT[first:], 900) for first in (0, 1)]
    whole = list(range(leaves, 2))
    assert run_virtually(interrupted(source, asked, leaves)) == (tokens[leaves:], whole, whole)


PROMPT = tuple(range(200))


def ops_of(frames: list[Frame]) -> list[Op]:
    """Return the operations of frames."""
    return [op for frame in frames for op in frame.ops]


async def tokens_of(loop: GenerationLoop, request: GenerationRequest) -> list[int]:
    """Return the tokens of the answer to `request`."""
    events = [event async for event in generate(loop, request)]
    return [token for e in events if isinstance(e, TokenChunk) for token in e.tokens]


def handed_over(drive: Drive) -> bool:
    """Return whether a plan may change now."""
    return drive.scheduler.backups.is_handed_over(drive.scheduler.running.values(), drive.now)


@pytest.mark.parametrize("before", [3, 40])
def test_a_planned_change_computes_nothing_again(before: int) -> None:
    """Prompts and answers with chunks and drafts in flight are backed up to their last token before."""
    drive = Drive(stages=3, depth=2)
    asked = {drive.submit(range(i, 60 + i), 90): range(i, 60 + i) for i in range(FEW)}
    drive.run_frames(before)
    assert not handed_over(drive)
    drive.scheduler.backups.hand_over(begin=True)
    assert not handed_over(drive)
    sent = len(drive.stage.seen)
    drive.run()
    assert handed_over(drive)
    assert not any(frame.segments for frame in drive.stage.seen[sent:]), "nothing more is computed"
    held = {s.seq_id: s.held_tokens for s in drive.scheduler.running.values() if s.held_tokens}
    assert held and {one: drive.scheduler.backups.tokens_of(one) for one in held} == held
    drive.scheduler.backups.hand_over(begin=False)
    drive.new_plan(FakeLastStage(1), stages=2)
    drive.run()
    first = {s.seq_id: s.position for frame in reversed(drive.stage.seen) for s in frame.segments}
    assert {one: first[one] for one in held} == held
    for seq_id, prompt in asked.items():
        assert drive.tokens(seq_id) == plain(prompt, 90)


def test_a_plan_that_stays_continues_its_answers() -> None:
    """An answer pauses for a hand-over, and goes on if the plan does not change after all."""
    drive = Drive(stages=2)
    seq_id = drive.submit(range(60), 40)
    drive.run_frames(5)
    drive.scheduler.backups.hand_over(begin=True)
    drive.run()
    assert drive.scheduler.running
    drive.scheduler.backups.hand_over(begin=False)
    drive.run()
    assert drive.tokens(seq_id) == plain(range(60), 40)


def test_a_hand_over_pauses_no_answer_in_vain() -> None:
    """While a state has no room, all of them are computed on. A transfer that hangs pauses for HOLD_SECONDS at most."""
    drive = Drive()
    drive.scheduler.backups.limit = 100
    drive.submit(range(60), 900)
    drive.run_frames(30)
    drive.scheduler.backups.hand_over(begin=True)
    drive.run_frames(10)
    assert not drive.scheduler.backups.holding and not handed_over(drive)
    stuck = Drive()
    stuck.submit(range(60), 900)
    stuck.run_frames(10)
    stuck.scheduler.backups.hand_over(begin=True)
    with patch.object(stuck, "_read_backup"):
        stuck.run()
        assert not handed_over(stuck)
        stuck.now += HOLD_SECONDS
        assert handed_over(stuck)
