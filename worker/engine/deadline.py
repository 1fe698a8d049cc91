"""The deadline estimate of a frame, after which the engine counts as stuck. Plain data, without a clock."""

from __future__ import annotations

from proto.frame import Admit, Frame

FIRST_SECONDS = 30.0
"""Seconds. Deadline of the first frame, and upper bound for a frame of a new size.

Kernels are compiled and pages are read then, and the speed of the machine is unknown.
"""

NEW_SIZE_SECONDS = 2.0
"""Seconds added for the first frame of a size, whose kernels may have to be compiled."""

SLACK = 4.0
"""Factor over the usual time of a size, for other programs, swapping and a hot machine."""

VOCABULARY_SECONDS = 20.0
"""Seconds added for a frame that brings a vocabulary. The last stage prepares 250,000 tokens in about 1.4 s."""

SMOOTHING = 0.2
"""Weight of the newest frame in the usual time."""

Size = tuple[int, int]
"""The rows and the farthest position, as powers of two. The time of a pass depends on these."""


class DeadlineEstimate:
    """The learned times of frames by size. No deadline is below `least` seconds."""

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._usual: dict[Size, float] = {}

    def seconds(self, frame: Frame) -> float:
        """Return the deadline of `frame` in seconds."""
        extra = VOCABULARY_SECONDS if _brings_vocabulary(frame) else 0.0
        return max(self._least, self._learned(frame)) + extra

    def _learned(self, frame: Frame) -> float:
        if not self._usual:
            return FIRST_SECONDS
        size = _size(frame)
        if (usual := self._usual.get(size)) is not None:
            return SLACK * usual
        return min(FIRST_SECONDS, NEW_SIZE_SECONDS + SLACK * self._expected(size))

    def _expected(self, size: Size) -> float:
        """Return the expected seconds of a new size. The cost grows at most with rows times positions."""
        rows, end = size
        return min(
            usual * 2.0 ** (max(0, rows - seen_rows) + max(0, end - seen_end))
            for (seen_rows, seen_end), usual in self._usual.items()
        )

    def record_frame_time(self, frame: Frame, seconds: float) -> None:
        """Record that `frame` took `seconds`."""
        if _brings_vocabulary(frame):
            return
        size = _size(frame)
        usual = self._usual.get(size, seconds)
        self._usual[size] = usual + SMOOTHING * (seconds - usual)


def _brings_vocabulary(frame: Frame) -> bool:
    return any(isinstance(op, Admit) and op.vocabulary for op in frame.ops)


def _size(frame: Frame) -> Size:
    end = 0
    for segment in frame.segments:
        end = max(end, segment.position + segment.width)
    return frame.rows.bit_length(), end.bit_length()
