"""How long a frame may keep the engine busy before it counts as stuck. Plain data, no clock."""

from __future__ import annotations

from proto.frame import Frame

FIRST_SECONDS = 30.0
"""For the first frame of its size: kernels are compiled, pages are read, and nobody knows how slow this machine is."""

SLACK = 4.0
"""Times what frames of the size usually take: other programs, swapping, a hot machine."""

SMOOTHING = 0.2
"""Weight of the newest frame in the usual time."""

Size = tuple[int, int]
"""Rows and the farthest position, as powers of two: what a pass takes follows from these."""


class Allowance:
    """Learns what frames take, by size."""

    def __init__(self) -> None:
        self._usual: dict[Size, float] = {}

    def seconds(self, frame: Frame) -> float:
        """How long this frame may take."""
        usual = self._usual.get(_size(frame))
        return FIRST_SECONDS if usual is None else SLACK * usual

    def observe(self, frame: Frame, seconds: float) -> None:
        """A frame took so long."""
        size = _size(frame)
        usual = self._usual.get(size, seconds)
        self._usual[size] = usual + SMOOTHING * (seconds - usual)


def _size(frame: Frame) -> Size:
    end = max((s.position + s.width for s in frame.segments), default=0)
    return frame.rows.bit_length(), end.bit_length()
