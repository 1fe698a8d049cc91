"""How long a frame may keep the engine busy before it counts as stuck. Plain data, no clock."""

from __future__ import annotations

from proto.frame import Admit, Frame

FIRST_SECONDS = 30.0
"""For the first frame of all, and at most for one of a new size: kernels are compiled, pages are read, and nobody
knows how slow this machine is."""

NEW_SIZE_SECONDS = 2.0
"""For the first frame of its size, over what smaller or larger ones let expect: kernels of another shape."""

SLACK = 4.0
"""Times what frames of the size usually take: other programs, swapping, a hot machine."""

VOCABULARY_SECONDS = 20.0
"""Seconds added for a frame that brings a vocabulary. The last stage prepares 250,000 tokens in about 1.4 s."""

SMOOTHING = 0.2
"""Weight of the newest frame in the usual time."""

Size = tuple[int, int]
"""Rows and the farthest position, as powers of two: what a pass takes follows from these."""


class DeadlineEstimate:
    """Learns what frames take, by size. Any may take `least` seconds, whatever is learned."""

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._usual: dict[Size, float] = {}

    def seconds(self, frame: Frame) -> float:
        """How long this frame may take."""
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
        """Seconds for a size not seen yet. A pass costs no more than rows times positions: grown from those seen."""
        rows, end = size
        return min(
            usual * 2.0 ** (max(0, rows - seen_rows) + max(0, end - seen_end))
            for (seen_rows, seen_end), usual in self._usual.items()
        )

    def observe(self, frame: Frame, seconds: float) -> None:
        """A frame took so long."""
        if _brings_vocabulary(frame):
            return
        size = _size(frame)
        usual = self._usual.get(size, seconds)
        self._usual[size] = usual + SMOOTHING * (seconds - usual)


def _brings_vocabulary(frame: Frame) -> bool:
    return any(isinstance(op, Admit) and op.vocabulary for op in frame.ops)


def _size(frame: Frame) -> Size:
    end = max((s.position + s.width for s in frame.segments), default=0)
    return frame.rows.bit_length(), end.bit_length()
