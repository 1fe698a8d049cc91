"""The kind of a returned frame and its rejected rows, for the frame history."""

from __future__ import annotations

from collections.abc import Set

from coordinator.status.frame_history import FrameHistory, FrameKind
from proto.frame import Frame


def record_frame(history: FrameHistory, frame: Frame, sent_at: float, now: float) -> None:
    """Add a returned frame to `history`."""
    if not frame.segments:  # only operations, such as the end of a sequence
        return
    wasted = sum(
        segment.width if outcome.cancelled else segment.width - outcome.accepted_length
        for segment, outcome in zip(frame.segments, frame.outcomes, strict=True)
    )
    rows = sum(segment.width for segment in frame.segments)
    key = frame.epoch, frame.number
    overlapping = history.record_sequences({s.seq_id for s in frame.segments}, sent_at, now)
    kind = _kind_of(frame, overlapping)
    history.record_frame(kind, rows, wasted, frame.stage_us, sent_at, now, key)


def _kind_of(frame: Frame, overlapping: Set[int]) -> FrameKind:
    """Return the kind. `overlapping` sequences had another frame in flight when this one was sent."""
    if all(outcome.cancelled for outcome in frame.outcomes):
        return "invalidated"
    if not all(segment.open for segment in frame.segments):
        return "prompt"
    if any(s.seq_id in overlapping and not s.continues for s in frame.segments):
        return "speculative"  # it assumes that the window in flight is accepted whole
    return "window" if any(segment.width > 1 for segment in frame.segments) else "decode"
