"""The trace: one debug record for every frame that has been through all stages. CONTRIBUTING.md says how to read it.

It holds counts, positions and times. What the tokens are is the user's business and stays out.
"""

from __future__ import annotations

import logging

from proto.frame import DropPrefix, Frame, Op
from proto.segment import Outcome, Segment

log = logging.getLogger(__name__)


def log_frame(frame: Frame) -> None:
    """Write the record of a frame as the last stage returned it, if anyone listens."""
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
    """`admit 3`, `commit 3`: what the header did, to which sequence; for `drop`, to which prefix entry."""
    return f"{op.kind} {op.entry if isinstance(op, DropPrefix) else op.seq_id}"


def describe_segment(segment: Segment, outcome: Outcome) -> str:
    """`3.12@140 kept 2/4 drafts 3`: of sequence 3, window 12 at position 140, 2 of 4 tokens right, 3 drafts follow.

    A prompt chunk is always kept whole: `3.0@0 prompt 512`. What built on a rejected window is `stale`.
    """
    name = f"{segment.seq_id}.{segment.window}@{segment.position}"
    if outcome.cancelled:
        return f"{name} stale"
    if not segment.open:
        return f"{name} prompt {segment.width}" + (" sampled" if outcome.token is not None else "")
    return f"{name} kept {outcome.accepted_length}/{segment.width} drafts {len(outcome.drafts)}"
