"""The records of frames: kinds, rates, stage times, and shares of time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from coordinator.drafts.averages import DraftResult
from coordinator.status.frame_records import MAX_RECORDS, RATE_SECONDS, FrameRecords
from proto.frame import Frame, Outcome, Segment

Pair = tuple[Segment, Outcome]

PROMPT = Segment(0, 0, 0, (1, 2, 3)), Outcome(0, 0, 3)
DECODE = Segment(0, 1, 5, (4,), open=True, sample=True), Outcome(0, 1, 1, 5)
WINDOW = Segment(1, 1, 3, (4, 5, 6), open=True), Outcome(1, 1, 2, 9)
INVALID = Segment(1, 2, 6, (7, 8), open=True, cancelled=True), Outcome(1, 2, 0, cancelled=True)
AHEAD = Segment(2, 4, 9, (), open=True, sample=True, continues=True), Outcome(2, 4, 1, 5)


def frame_of(*pairs: Pair, number: int = 0, epoch: int = 1, us: Any = (1, 3)) -> Frame:
    segments, outcomes = zip(*pairs, strict=True)
    return Frame(epoch, number, (), segments, outcomes, us)


@pytest.mark.parametrize(
    ("pairs", "speculative", "expected"),
    [
        ([PROMPT], False, ("prompt", 3, 0)),
        ([DECODE, AHEAD], False, ("decode", 2, 0)),
        ([WINDOW], False, ("window", 3, 1)),
        ([WINDOW], True, ("speculative", 3, 1)),
        ([INVALID], True, ("invalidated", 2, 2)),
        ([WINDOW, PROMPT], False, ("prompt", 6, 1)),
    ],
)
def test_frames_by_kind(pairs: list[Pair], speculative: bool, expected: Any) -> None:
    """Rejected drafts and invalidated windows are wasted rows. Drafts are counted by position."""
    records, frame = FrameRecords(), frame_of(*pairs)
    drafts = [DraftResult(1, True), DraftResult(2, False), DraftResult(1, False)]
    records.record_frame(frame, 1.0, 1.1, speculative=speculative, draft_results=drafts)
    (found,) = records.records
    assert (found.kind, found.rows, found.wasted) == expected
    assert (records.drafts.drafted, records.drafts.accepted) == ([2, 1], [1, 0])


def test_the_newest_frames_that_computed_are_kept() -> None:
    """The end of a sequence computes nothing. A reader that fell behind gets the newest records."""
    records = FrameRecords()
    records.record_frame(Frame(1, 0, stage_us=(1, 1)), 1.0, 1.1)
    for number in range(MAX_RECORDS + 5):
        records.record_frame(frame_of(DECODE, number=number), number, number + 0.1)
    assert len(records.records) == MAX_RECORDS
    last = MAX_RECORDS + 5
    for number, most, expected in ((last - 2, 9, [last - 1, last]), (0, 1, [last]), (last, 9, [])):
        assert [record.number for record in records.since(number, most)] == expected


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """A prompt without a token adds nothing, old tokens leave, and one token is no endless rate."""
    records = FrameRecords()
    records.record_frame(frame_of(PROMPT), 0.0, 0.5)
    records.record_frame(frame_of(PROMPT), 0.5, 1.0, tokens=1)
    assert records.tokens_per_second(1.0) <= 10
    records.record_frame(frame_of(WINDOW), 1.0, 2.0, tokens=3)
    assert records.tokens_per_second(3.0) == pytest.approx(4 / 2)
    assert records.tokens_per_second(2.0 + RATE_SECONDS + 0.1) == 0.0


def test_stage_times_are_those_of_decode_steps_of_the_present_plan() -> None:
    """Prompts do not count, and steps of an earlier plan count no more, even with as many stages."""
    records = FrameRecords()

    def step_times(epoch: int) -> list[float | None]:
        return [load.step_ms for load in records.stage_loads(epoch, 0.5)]

    assert step_times(1) == []
    for us in ((1000, 3000), (2000, 5000)):
        records.record_frame(frame_of(DECODE, us=us), 0.0, 0.1, tokens=1)
    records.record_frame(frame_of(PROMPT, us=(90_000, 90_000)), 0.1, 0.2, tokens=1)
    assert step_times(1) == [1.5, 4.0]
    assert step_times(2) == []
    records.record_frame(frame_of(PROMPT, epoch=2), 0.2, 0.3)
    assert step_times(2) == [None, None]
    records.record_frame(frame_of(DECODE, epoch=2, us=(500, 700)), 0.3, 0.4, tokens=1)
    assert step_times(2) == [0.5, 0.7]


def test_the_share_of_time_is_that_of_the_last_seconds() -> None:
    """A stage that computes half of the time has 50 %, and an idle one 0 %, also when its last step is known."""
    records = FrameRecords()
    for tenth in range(int(RATE_SECONDS * 10)):
        at = tenth / 10
        records.record_frame(frame_of(DECODE, us=(20_000, 50_000)), at, at + 0.1, tokens=1)
    first, second = records.stage_loads(1, RATE_SECONDS)
    assert (first.busy, second.busy) == pytest.approx((0.2, 0.5))
    later = records.stage_loads(1, 3 * RATE_SECONDS)
    assert [(load.step_ms, load.busy) for load in later] == [(20, 0), (50, 0)]


@pytest.mark.parametrize("seed", range(10))
def test_hostile_times_give_no_impossible_figures(seed: int) -> None:
    """Clocks that step, endless stage times, gaps and changes of the plan leave all shares between 0 and 1."""
    random = Random(seed)
    records, now = FrameRecords(), 1000.0
    for number in range(300):
        now += random.choice((0.0, 0.01, 0.1, 5.0, 60.0, -3.0))
        sent = now + random.choice((-0.2, -30.0, 0.0, 4.0))
        us = tuple(random.choice((0, 900, 400_000, 10**12)) for _ in range(1 + number // 100))
        frame = frame_of(random.choice((DECODE, PROMPT)), number=number, epoch=number // 100, us=us)
        records.record_frame(frame, sent, now, tokens=random.choice((0, 1)))
        for epoch in (number // 100, 7):
            loads = records.stage_loads(epoch, now + random.choice((-5.0, 0.0, 5.0)))
            assert len(loads) in ((len(us),) if epoch != 7 else (0,))
            assert all(0 <= load.busy <= 1 for load in loads)


def test_a_stage_computes_one_frame_after_another() -> None:
    """A block begins after the one before it in its row, and after its own in the stage before."""
    records = FrameRecords()
    for number, sent in ((0, 10.0), (1, 10.001), (2, 20.0)):
        frame = frame_of(DECODE, number=number, us=(10_000, 20_000))
        records.record_frame(frame, sent, sent + 0.1)
    records.record_frame(frame_of(DECODE, epoch=2, us=(10_000,)), 20.001, 20.1)
    first, second, third, replanned = (sum(record.stages, ()) for record in records.records)
    assert first == pytest.approx((10.0, 10.01, 10.01, 10.03))
    assert second == pytest.approx((10.01, 10.02, 10.03, 10.05))
    assert third == pytest.approx((20.0, 20.01, 20.01, 20.03))
    assert replanned == pytest.approx((20.001, 20.011))
