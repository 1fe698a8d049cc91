"""The record that the scheduler keeps of a frame in flight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class FrameInFlight:
    """A frame that has not returned: when it was sent, and which work it carries."""

    number: int
    sent_at: float
    """Seconds, in the clock of the scheduler's caller."""
    alone: bool
    """No other frame was in flight when this one was sent."""
    decode_rows: int = 0
    """Windows in the frame; 0 for prompt chunks."""
    micro_batches: int = 1
    """Micro-batches in flight at most, when the frame was sent."""
    fill: int = 1
    """Windows in flight per sequence at most, when the frame was sent."""
    valid_windows: int = 0
    """Windows in the frame that no outcome has invalidated."""
    continues: bool = False
    """The frame was sent before the frame before it returned, and its windows continue those of this frame."""
    speculative: bool = False
    """The frame carries a window that was sent before the previous window of its sequence returned."""
