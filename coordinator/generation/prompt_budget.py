"""The number of prompt tokens in a frame, from the measured time of earlier ones. Pure data."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from proto.frame import Frame

SECONDS_BESIDE_STREAMS = 0.25
"""Seconds. Time of the prompt frames between two windows of a running stream, in all stages together.

A reader notices longer gaps. A frame of half the tokens costs prompts of a large model about a tenth of their speed,
because the stages read all weights for each.
"""

SECONDS_ALONE = 1.0
"""Seconds. The same while no stream runs, for the chunks after the first of a frame. A short request waits for them."""

SHORTEST_FRAME = 32
"""Tokens. Lower bound, and unit, of the budget. Reading the weights takes most of the time of a shorter frame."""

FIRST_FRAME = 64
"""Tokens. Budget before the first measurement. 512 tokens take several seconds on a slow machine."""

RECENT_FRAMES = 5
"""Frames. The budget follows their median, so that one slow frame changes nothing."""


class PromptBudget:
    """The time of prompt tokens in the slowest stage, and the budget of the next frame that follows from it."""

    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=RECENT_FRAMES)

    def record_frame(self, frame: Frame) -> None:
        """Record the time of a returned frame, unless it has windows or is shorter than SHORTEST_FRAME."""
        rows = frame.rows
        if frame.stage_us and rows >= SHORTEST_FRAME and not any(s.open for s in frame.segments):
            self._seconds_per_token.append(max(frame.stage_us) / 1e6 / rows)

    def frame_tokens(self, stages: int, *, streams: bool) -> int:
        """Return the maximum of prompt tokens in the next frame.

        `streams` says that a stream is running. Each of the `stages` works on a prompt frame between two of its
        windows.
        """
        if not self._seconds_per_token:
            return FIRST_FRAME
        seconds = SECONDS_BESIDE_STREAMS if streams else SECONDS_ALONE
        pace = max(1e-9, stages * median_low(self._seconds_per_token))
        return max(SHORTEST_FRAME, int(seconds / pace) // SHORTEST_FRAME * SHORTEST_FRAME)
