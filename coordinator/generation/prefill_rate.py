"""The expected time of a prompt, learned from the chunks that were computed. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from proto.frame import Frame

FORGETTING = 0.98
"""Weight of older chunks relative to the next one: about 50 chunks count."""

SMALLEST_CHUNK = 32
"""Tokens. Shorter chunks say more about the overhead of a frame than about a long prompt."""


@dataclass
class PrefillRate:
    """A line through the seconds per token of each chunk, over the chunk's position.

    The slope is the attention over earlier tokens, which makes long prompts slower per token. The sums are those of a
    weighted least-squares fit, with the position in thousands of tokens.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def record_frame(self, frame: Frame) -> None:
        """Record a returned frame that carries one chunk of one prompt. The slowest stage sets the pace."""
        if len(frame.segments) != 1 or not frame.stage_us:
            return
        (segment,) = frame.segments
        if segment.open or segment.rows < SMALLEST_CHUNK:
            return
        position = (segment.position + segment.width / 2) / 1000
        seconds = max(frame.stage_us) / 1e6 / segment.width
        self.weight = FORGETTING * self.weight + 1.0
        self.x = FORGETTING * self.x + position
        self.y = FORGETTING * self.y + seconds
        self.xx = FORGETTING * self.xx + position * position
        self.xy = FORGETTING * self.xy + position * seconds

    def expected_seconds(self, start: int, end: int) -> float | None:
        """Return the expected seconds for the tokens `[start, end)` of a prompt; None before the first chunk."""
        if not self.weight:
            return None
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        covariance = self.xy / self.weight - mean_x * mean_y
        slope = max(0.0, covariance / variance) if variance > 1e-6 else 0.0
        middle = (start + end) / 2000
        per_token = max(mean_y + slope * (middle - mean_x), mean_y / 10)
        return (end - start) * per_token
