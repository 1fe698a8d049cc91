"""The kind of a frame and its rejected rows."""

from __future__ import annotations

import pytest

from coordinator.generation.frame_kind import record_frame
from coordinator.status.frame_history import FrameHistory
from proto.frame import Frame
from proto.segment import Outcome, Segment


@pytest.mark.parametrize(
    ("segments", "outcomes", "expected"),
    [
        ([Segment(1, 0, 0, (1, 2, 3))], [Outcome(1, 0, 3)], ("prompt", 3, 0)),
        ([Segment(1, 1, 3, (4,), open=True)], [Outcome(1, 1, 1, 5)], ("decode", 1, 0)),
        ([Segment(1, 1, 3, (4, 5, 6), open=True)], [Outcome(1, 1, 2, 9)], ("window", 3, 1)),
        (
            [Segment(1, 2, 6, (7, 8), open=True, cancelled=True)],
            [Outcome(1, 2, 0, cancelled=True)],
            ("invalidated", 2, 2),
        ),
        (
            [Segment(1, 1, 3, (4, 5), open=True), Segment(2, 0, 0, (1, 2))],
            [Outcome(1, 1, 1, 9), Outcome(2, 0, 2)],
            ("prompt", 4, 1),
        ),
    ],
)
def test_frames_by_kind(
    segments: list[Segment], outcomes: list[Outcome], expected: tuple[str, int, int]
) -> None:
    """Rejected drafts and invalidated windows count as wasted rows."""
    history = FrameHistory()
    frame = Frame(1, 0, segments=tuple(segments), outcomes=tuple(outcomes), stage_us=(5, 6))
    record_frame(history, frame, 1.0, 1.1)
    (found,) = history.frames
    assert (found.kind, found.rows, found.wasted) == expected


def test_a_frame_without_segments_is_left_out() -> None:
    """The end of a sequence computes nothing."""
    history = FrameHistory()
    record_frame(history, Frame(1, 0, stage_us=(1, 1)), 1.0, 1.1)
    assert not history.frames
