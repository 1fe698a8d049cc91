"""The times at which a frame passes the steps of one process, and the ring that keeps the newest of them.

Times are nanoseconds of `time.monotonic_ns`. A step that did not take place has time 0.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum, auto
from time import monotonic_ns

RING_FRAMES = 8192
"""Frames. About a minute of one fast stream; a ring of this size takes about 3 MB."""


class StageStep(IntEnum):
    """The steps of a frame in a stage, in order. The steps of relayed tokens follow."""

    RECEIVED = 0
    """The reader has the frame's bytes."""
    STARTED = auto()
    """The engine thread takes the frame."""
    DECODED = auto()
    """The header is read."""
    RELAYED = auto()
    """The engine thread has the tokens that a parked frame waited for."""
    BEGUN = auto()
    """The engine begins to apply the header."""
    BUILT = auto()
    """Python has built the computation."""
    COMPUTED = auto()
    """The device has finished the stage's own computation."""
    READ = auto()
    """The result is in the memory of the host."""
    ENCODED = auto()
    """The outgoing frame is encoded."""
    WRITTEN = auto()
    """The socket has accepted the outgoing frame."""
    TOKENS_ENCODED = auto()
    """On the last of several stages: the tokens for the first stage are encoded."""
    TOKENS_RECEIVED = auto()
    """On the first of several stages: the reader has the tokens that the last stage relays after this frame."""


class CoordinatorStep(IntEnum):
    """The steps of a frame in the coordinator, in order."""

    SCHEDULED = 0
    """The scheduler has made the frame."""
    ENCODED = auto()
    """The frame is encoded."""
    WRITTEN = auto()
    """The socket has accepted the frame."""
    RECEIVED = auto()
    """The event loop has the bytes of the result."""
    DECODED = auto()
    """The result is decoded."""
    APPLIED = auto()
    """The scheduler has applied the outcomes."""
    SENT_NEXT = auto()
    """All frames that follow from the outcomes are sent."""
    DELIVERED = auto()
    """The events for clients are in their queues."""


class FrameStamps:
    """The times of one frame in one process, by step. The thread that does a step marks it."""

    __slots__ = ("epoch", "number", "rows", "stage", "times")

    def __init__(self, stage: int, steps: type[IntEnum]) -> None:
        self.epoch = 0
        self.number = 0
        self.rows = 0
        self.stage = stage
        self.times = [0] * len(steps)

    def name_frame(self, epoch: int, number: int, rows: int) -> None:
        """Record which frame it is, once its header is known."""
        self.epoch, self.number, self.rows = epoch, number, rows

    def mark(self, step: IntEnum) -> None:
        """Record that `step` is done now."""
        self.times[step] = monotonic_ns()


class StampRing:
    """The stamps of the newest RING_FRAMES frames. Any thread may call its methods."""

    def __init__(self) -> None:
        # Appending to a deque, reading an end of it and copying it are atomic, so there is no lock.
        self._stamps: deque[FrameStamps] = deque(maxlen=RING_FRAMES)

    def add_frame(self, stage: int, steps: type[IntEnum]) -> FrameStamps:
        """Add a frame, mark its first step, and return its stamps."""
        stamps = FrameStamps(stage, steps)
        stamps.times[0] = monotonic_ns()
        self._stamps.append(stamps)
        return stamps

    def find_frame(self, epoch: int, number: int) -> FrameStamps | None:
        """Return the stamps of a frame. The search begins with the newest."""
        for back in range(1, len(self._stamps) + 1):
            stamps = self._stamps[-back]
            if stamps.number == number and stamps.epoch == epoch:
                return stamps
        return None

    def newest_ns(self) -> int:
        """Return the time of the newest frame's first step, 0 without a frame."""
        return self._stamps[-1].times[0] if self._stamps else 0

    def since(self, moment_ns: int) -> list[FrameStamps]:
        """Return the frames whose first step was at `moment_ns` or later, oldest first."""
        newest = []
        for stamps in reversed(self._stamps.copy()):
            if stamps.times[0] < moment_ns:
                break
            newest.append(stamps)
        return newest[::-1]
