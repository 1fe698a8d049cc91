"""The coordinator backs sequences up as often as failures suggest, and the next plan computes only what is missing."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

from coordinator.generation.backups import (
    CALM_PAUSE,
    MIN_NEW_TOKENS,
    STORM_PAUSE,
    Backup,
)
from proto.backup import PIECE_BYTES, LayerState, PieceJoiner, split
from proto.frame import Frame
from proto.operation import BackUp, RestoreBackup
from tests.support.protocol.scheduler_drive import Drive
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
