"""The stamps of one process, and the offset of its clock from the coordinator's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from proto.frame_stamps import CoordinatorStep, FrameStamps, StageStep

COORDINATOR = -1
"""Number of the coordinator among the stages of a trace."""


@dataclass(frozen=True)
class ClockOffset:
    """A process's clock minus the coordinator's, in nanoseconds. The true value differs by at most `error_ns`."""

    offset_ns: int = 0
    error_ns: int = 0


@dataclass(frozen=True)
class RoundTrip:
    """One exchange: sent and received in the coordinator's clock, answered at `remote_ns` in the process's clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int


def align_clocks(round_trips: Iterable[RoundTrip]) -> ClockOffset:
    """Return the offset of a process's clock from the round trips to it.

    The answer was given somewhere within each round trip, so each one bounds the offset on both sides. Where the bounds
    of all round trips admit 0, both processes read the clock of the same machine and the offset is 0.
    """
    trips = list(round_trips)
    low = max(trip.remote_ns - trip.received_ns for trip in trips)
    high = min(trip.remote_ns - trip.sent_ns for trip in trips)
    if low <= 0 <= high:
        return ClockOffset()
    return ClockOffset((low + high) // 2, max(0, (high - low + 1) // 2))


@dataclass(frozen=True)
class FrameTimes:
    """One frame in one process: times by step in nanoseconds of the coordinator's clock, 0 for a step not done."""

    epoch: int
    number: int
    rows: int
    times: tuple[int, ...]


@dataclass(frozen=True)
class ProcessTrace:
    """The frames of one stage, or of the coordinator if `stage` is COORDINATOR."""

    name: str
    stage: int
    clock: ClockOffset
    frames: tuple[FrameTimes, ...]

    @property
    def steps(self) -> type[IntEnum]:
        """The steps that the times belong to."""
        return CoordinatorStep if self.stage == COORDINATOR else StageStep


def process_trace(
    name: str, stage: int, stamps: Sequence[FrameStamps], clock: ClockOffset | None = None
) -> ProcessTrace:
    """Return the trace of a process, with its times in the coordinator's clock."""
    clock = clock or ClockOffset()
    frames = tuple(
        FrameTimes(
            one.epoch,
            one.number,
            one.rows,
            tuple(moment - clock.offset_ns if moment else 0 for moment in one.times),
        )
        for one in stamps
        if one.epoch
    )
    return ProcessTrace(name, stage, clock, frames)
