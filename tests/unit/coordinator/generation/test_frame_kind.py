"""The kind of a frame and its rejected rows."""

from __future__ import annotations

import pytest

from coordinator.generation.frame_kind import record_frame
from coordinator.status.frame_history import MAX_SEQUENCES, FrameHistory
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


def test_a_window_on_an_unverified_prefix_is_speculative() -> None:
    """A window that was sent before the previous one of its sequence returned is speculative. Run-ahead is not."""
    history = FrameHistory()
    windows = [
        (Segment(1, 1, 3, (4, 5), open=True), 1.0, 1.2),
        (Segment(1, 2, 5, (6, 7), open=True), 1.1, 1.3),
        (Segment(2, 1, 5, (6, 7), open=True), 1.15, 1.35),
        (Segment(1, 3, 7, (8, 9), open=True), 1.3, 1.5),
        (Segment(1, 4, 9, (), open=True, continues=True), 1.4, 1.6),
    ]
    for segment, sent_at, now in windows:
        outcome = Outcome(segment.seq_id, segment.window, segment.width, 9)
        record_frame(
            history,
            Frame(1, 0, segments=(segment,), outcomes=(outcome,), stage_us=(5,)),
            sent_at,
            now,
        )
    kinds = [frame.kind for frame in history.frames]
    assert kinds == ["window", "speculative", "window", "window", "decode"]


def test_ended_sequences_leave_the_history() -> None:
    """The returns of sequences are bounded, and the newest stay."""
    history = FrameHistory()
    for number in range(2 * MAX_SEQUENCES):
        history.record_sequences({number}, 1.0, 2.0)
    assert len(history._returned_at) == MAX_SEQUENCES
    assert history.record_sequences({0, 2 * MAX_SEQUENCES - 1}, 1.5, 2.5) == {2 * MAX_SEQUENCES - 1}
