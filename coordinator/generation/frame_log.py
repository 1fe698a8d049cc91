"""The frame log: one debug record for each frame that returns. CONTRIBUTING.md explains how to read it.

A record holds counts, positions and times. It holds no tokens, because these are the user's text.
"""

from __future__ import annotations

import logging

from proto.frame import DropPrefix, Frame, Op
from proto.segment import Outcome, Segment

log = logging.getLogger(__name__)


def log_frame(frame: Frame) -> None:
    """Log the record of a returned frame at debug level."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    done = zip(frame.segments, frame.outcomes, strict=True)
    log.debug(
        "frame",
        extra={
            "epoch": frame.epoch,
            "number": frame.number,
            "rows": frame.rows,
            "stage_ms": "+".join(f"{us / 1000:.1f}" for us in frame.stage_us),
            "ops": ", ".join(map(describe_op, frame.ops)),
            "segments": ", ".join(describe_segment(segment, outcome) for segment, outcome in done),
        },
    )


def describe_op(op: Op) -> str:
    """Return the operation and its sequence, such as `admit 3`; for `drop`, the operation and its prefix entry."""
    return f"{op.kind} {op.entry if isinstance(op, DropPrefix) else op.seq_id}"


def describe_segment(segment: Segment, outcome: Outcome) -> str:
    """Return one line about a segment, such as `3.12@140 accepted 2/4 drafts 3`.

    The example is window 12 of sequence 3 at position 140. Its accepted length is 2 of 4 tokens, and 3 drafts follow.
    A prompt chunk reads `3.0@0 prompt 512`. A window that builds on a rejected one is `invalidated`.
    """
    name = f"{segment.seq_id}.{segment.window}@{segment.position}"
    if outcome.cancelled:
        return f"{name} invalidated"
    if not segment.open:
        return f"{name} prompt {segment.width}" + (" sampled" if outcome.token is not None else "")
    return f"{name} accepted {outcome.accepted_length}/{segment.width} drafts {len(outcome.drafts)}"
