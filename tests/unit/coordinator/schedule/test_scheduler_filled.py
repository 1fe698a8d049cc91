"""Tests of the filled pipeline: several windows of one sequence in flight, all but the first speculative.

The text is that of plain decoding, and no stage holds a token that it should not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.drafts.averages import Shape
from coordinator.drafts.controller import Controller, MtpMode
from coordinator.planning.capacity import Capacity
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.scheduler import KV_STEP, may_run_ahead
from coordinator.schedule.sequence import Sequence
from proto.frame import Evict
from proto.params import SamplingParams
from tests.support.protocol.scheduler_drive import ROOM, Drive, is_decode
from tests.support.stages.token_stages import FakeLastStage, plain

PROMPT = (1, 2, 3, 4, 5)


def driven(stages: int, right: int = 3, out_of: int = 5, mtp: str = "filled") -> Drive:
    """Return a driver of a filled pipeline."""
    return Drive(stages=stages, stage=FakeLastStage(right=right, out_of=out_of), mtp=mtp)


class Fixed(Controller):
    """A controller that fills the pipeline with windows of `width` tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(MtpMode.parse("filled"))
        self.width = width

    def choose_shape(self, sequences: int = 1, fill: int = 1) -> Shape:
        """Return windows of the fixed width."""
        return Shape(self.width, fill)


def max_in_flight(drive: Drive) -> int:
    """Run to the end. Return the maximum number of valid windows of one sequence in flight."""
    most = 0
    drive.fill()
    while drive.stage.in_flight:
        most = max([most, *(len(s.windows_in_flight) for s in drive.scheduler.running.values())])
        drive.back()
        drive.fill()
    return most


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("right", "out_of"), [(0, 5), (1, 2), (4, 5), (5, 5)])
def test_one_stream_fills_every_stage(stages: int, right: int, out_of: int) -> None:
    """One window per stage is in flight for any acceptance, and the text is that of plain decoding.

    A single stage runs ahead, so it has two.
    """
    drive = driven(stages, right, out_of)
    seq = drive.submit(PROMPT, tokens=40)
    assert max_in_flight(drive) == max(2, stages)
    assert drive.tokens(seq) == plain(PROMPT, 40)
    assert not drive.stage.sequences


def test_right_speculation_costs_one_frame_a_token() -> None:
    """If every draft is right, no token is taken back, and each window of one token brings its token."""
    drive = driven(4, right=5, out_of=5)
    drive.scheduler.controller = Fixed(1)
    seq = drive.submit(PROMPT, tokens=40)
    drive.run()
    assert drive.rollbacks == []
    assert len([f for f in drive.stage.seen if is_decode(f)]) == 39
    stats = drive.finished(seq).stats
    assert stats.accepted == stats.drafted


def test_a_prompt_that_comes_empties_the_stages_for_its_chunks() -> None:
    """While a prompt is prefilled, a running stream sends one window at a time."""
    drive = driven(4, right=5)
    first = drive.submit(PROMPT, tokens=60)
    drive.run_frames(10)
    drive.submit(range(1, 60), tokens=1)
    seen = len(drive.stage.seen)
    drive.fill()
    late = [s for f in drive.stage.seen[seen:] for s in f.segments]
    assert late and not any(s.open and s.seq_id == first for s in late)
    drive.run()
    assert drive.tokens(first) == plain(PROMPT, 60)


def test_no_more_windows_than_there_is_memory_for() -> None:
    """A plan with memory for two sequences has room for two open windows and two states: three windows of one.

    With memory for one sequence the stages run ahead with a second window, but no draft is speculative.
    """
    for sequences, most in ((1, 2), (2, 3), (16, 8)):
        room = replace(ROOM, sequences=sequences)
        drive = Drive(stages=8, room=room, stage=FakeLastStage(right=5), mtp="filled")
        drive.submit(PROMPT, tokens=40)
        assert max_in_flight(drive) == most


def test_a_stop_invalidates_the_windows_in_flight() -> None:
    """Windows after the end of a text emit nothing, and the saved prefix is the state of the stages."""
    expected = plain(PROMPT, 40)
    for at in range(1, 39):
        end = expected.index(expected[at])
        room = replace(ROOM, prefix_bytes=10**6)
        drive = Drive(stages=4, room=room, stage=FakeLastStage(right=5), mtp="filled")
        seq = drive.submit(PROMPT, tokens=40, stop=[expected[at]])
        drive.run()
        assert drive.tokens(seq) == expected[:end]
        assert drive.finished(seq).reason == "stop"
        assert any(isinstance(op, Evict) for f in drive.stage.seen for op in f.ops)
        assert not drive.stage.sequences


def running(count: int, prompt: int = 100, answer: int = 100) -> list[Sequence]:
    request = GenerationRequest(tuple(range(prompt)), answer, SamplingParams())
    return [Sequence(seq_id, request, 0.0) for seq_id in range(count)]


@pytest.mark.parametrize("stages", [2, 4])
def test_several_stages_run_ahead_with_every_place_taken(stages: int) -> None:
    """Stages that run one frame at a time hold the three states of a sequence that the plan reserves."""
    assert may_run_ahead(Capacity(8, 8 * 200, 0), stages, running(8))


def test_a_single_stage_copies_its_caches_into_tokens_that_nobody_reserved() -> None:
    """With every place taken, the copies of K/V must fit beside the capacities of the running sequences."""
    reserved, copies = 8 * 200, 8 * (100 + KV_STEP)
    assert not may_run_ahead(Capacity(8, reserved + copies - 1, 0), 1, running(8))
    assert may_run_ahead(Capacity(8, reserved + copies, 0), 1, running(8))


def test_a_single_stage_with_free_places_runs_ahead() -> None:
    """The memory of the places that are not taken holds the second windows and the copies."""
    assert not may_run_ahead(Capacity(8, 8 * 200, 0), 1, running(6))
    assert may_run_ahead(Capacity(8, 8 * 200, 0), 1, running(5))
