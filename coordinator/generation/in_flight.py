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
    follows: FrameInFlight | None = None
    """The frame whose windows this one continues, if it had not returned when this one was sent."""
    returned: bool = False
    speculative: bool = False
    """The frame carries a window that was sent before the previous window of its sequence returned."""

    @property
    def continues(self) -> bool:
        """True if the windows of this frame continue those of a frame that was in flight."""
        return self.follows is not None

    @property
    def waits(self) -> bool:
        """True while the frame that this one continues is in flight, so that this one is no micro-batch of its own."""
        return self.follows is not None and not self.follows.returned
