"""The placement of frames on a timeline, from the compute time of each stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.status.frame_history import MAX_FRAMES, FrameHistory


def test_a_lone_frame_lies_between_its_hops() -> None:
    """The time outside the stages is divided equally among the hops."""
    history = FrameHistory()
    history.record_frame("decode", 1, 0, (10_000, 20_000), 5.0, 5.036)
    (frame,) = history.frames
    assert sum(frame.stages, ()) == pytest.approx((5.002, 5.012, 5.014, 5.034))


def test_a_frame_waits_for_the_one_before_it() -> None:
    """A stage starts a frame when it has finished the previous one."""
    history = FrameHistory()
    history.record_frame("prompt", 64, 0, (10_000, 30_000), 0.0, 0.040)
    history.record_frame("prompt", 64, 0, (10_000, 30_000), 0.001, 0.070)
    second = history.frames[1]
    assert sum(second.stages, ()) == pytest.approx((0.010, 0.020, 0.040, 0.070))


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 0.02)), max_size=40)
)
def test_no_stage_ends_after_its_frame_returned(times: list[tuple[int, int, float]]) -> None:
    """A block never reaches beyond the moment at which the coordinator had the frame."""
    history = FrameHistory()
    now = 0.0
    for first, second, wait in times:
        now += wait
        returned = now + (first + second) / 1e6 + 0.001
        history.record_frame("window", 2, 1, (first, second), now, returned)
        frame = history.frames[-1]
        assert frame.stages[-1][1] <= returned + 1e-9
        assert [round((end - start) * 1e6) for start, end in frame.stages] == [first, second]


def test_a_new_plan_starts_with_free_stages() -> None:
    """Another number of stages forgets when the old stages were busy."""
    history = FrameHistory()
    history.record_frame("decode", 1, 0, (900_000,), 0.0, 1.0)
    history.record_frame("decode", 1, 0, (10_000, 10_000), 0.5, 0.52)
    assert history.frames[-1].stages[0][0] == pytest.approx(0.5)


def test_only_the_newest_frames_are_kept_and_returned() -> None:
    """A reader that fell behind gets the newest frames."""
    history = FrameHistory()
    for number in range(MAX_FRAMES + 5):
        history.record_frame("decode", 1, 0, (1,), number, number + 0.1)
    assert len(history.frames) == MAX_FRAMES
    assert [f.number for f in history.since(history.count - 2, 10)] == [
        MAX_FRAMES + 4,
        MAX_FRAMES + 5,
    ]
    assert [f.number for f in history.since(0, 1)] == [MAX_FRAMES + 5]
    assert history.since(history.count, 10) == []
