"""The times of the frames of a stage: their deadlines, and the choice to begin a frame before the last has finished."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

from mtp.device import this_device
from proto.frame import Admit, Frame

FIRST_SECONDS = 30.0
"""Seconds. Deadline of the first frame, and upper bound for a frame of a new size. Kernels are compiled and pages are
read then, and the speed of the machine is unknown."""

NEW_SIZE_SECONDS = 2.0
"""Seconds added for the first frame of a size, whose kernels may have to be compiled."""

GROUP_SECONDS = 10.0
"""Seconds. Least deadline of a frame of a group. A member waits in its sums while another one is busy or compiles, and
one that is lost is noticed by its silence."""

SLACK = 4.0
"""Factor over the usual time of a size, for other programs, swapping and a hot machine."""

VOCABULARY_SECONDS = 20.0
"""Seconds added for a frame that brings a vocabulary. The last stage prepares 250,000 tokens in about 3 s."""

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
        rows, end = size
        expected = min(  # the cost grows at most with rows times positions
            usual * 2.0 ** (max(0, rows - seen_rows) + max(0, end - seen_end))
            for (seen_rows, seen_end), usual in self._usual.items()
        )
        return min(FIRST_SECONDS, NEW_SIZE_SECONDS + SLACK * expected)

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
    end = max((segment.position + segment.width for segment in frame.segments), default=0)
    return frame.rows.bit_length(), end.bit_length()


PATIENCE = 0.5
"""Share of a frame's time to wait for the frame after it. The device is busy for the whole of that time."""

LONGEST_WAIT = 0.02
"""Seconds. Upper bound of that wait."""

TRIED_FRAMES = 16
"""Frames of a trial. The median of their intervals counts."""

SETTLED_FRAMES = 1024
"""Frames after which the other way is tried again."""


@dataclass
class Lead:
    """A choice of the first member of a group: to begin a frame before it has finished the one before, or not.

    The result of that one then waits until Python has built the next, and so does the coordinator's answer to it. That
    costs nothing while the device is busy for longer. Where building takes longer, as on a fast GPU, it costs a round
    trip for each token. So both ways are tried, and the one with the shorter interval between frames is kept.
    """

    ahead: bool = True
    trying: bool = True
    _known: dict[bool, float] = field(default_factory=dict)
    _recent: list[float] = field(default_factory=list)

    def record_interval(self, seconds: float) -> None:
        """Record the time between the ends of two frames that follow each other."""
        self._recent.append(seconds)
        if len(self._recent) < (TRIED_FRAMES if self.trying else SETTLED_FRAMES):
            return
        self._known[self.ahead] = median(self._recent)
        self._recent.clear()
        if self.trying and len(self._known) == 2:
            self.ahead, self.trying = min(self._known, key=self._known.__getitem__), False
        else:
            self.ahead, self.trying = not self.ahead, True


@dataclass(eq=False)
class FrameTimes:
    """The times that one loaded stage has shown. Another stage starts anew, because its model may be slower."""

    deadlines: DeadlineEstimate = field(default_factory=lambda: DeadlineEstimate(this_device().compile_seconds))
    usual: float = 0.0
    """Seconds that the newest finished frame took."""
    _leads: dict[int, Lead] = field(default_factory=dict)
    """By the bit length of a frame's windows."""
    _ended: tuple[int, float] = (-1, 0.0)
    """The number of the newest finished frame, and when that was in seconds of `time.perf_counter`."""

    def lead_of(self, frame: Frame) -> Lead:
        """Return the choice for frames with as many windows as `frame`."""
        return self._leads.setdefault(len(frame.segments).bit_length(), Lead())

    def record_end(self, frame: Frame, out: Frame) -> None:
        """Record that `frame` has ended now as `out`."""
        (number, before), now = self._ended, time.perf_counter()
        if frame.continues and number == frame.number - 1:
            self.lead_of(frame).record_interval(now - before)
        self._ended = frame.number, now
        self.usual = out.stage_us[-1] / 1e6
        self.deadlines.record_frame_time(out, self.usual)
