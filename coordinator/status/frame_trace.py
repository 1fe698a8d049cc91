"""The trace of frames through all processes: aligned clocks, times between steps, and Chrome's trace format.

https://ui.perfetto.dev and chrome://tracing open the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import median, quantiles
from typing import Any, NamedTuple

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


class Phase(NamedTuple):
    """The time between two steps of one process. Phases on a `track` never overlap; others may."""

    name: str
    start: IntEnum
    end: IntEnum
    track: str = ""


PHASES: dict[type[IntEnum], tuple[Phase, ...]] = {
    StageStep: (
        Phase("queue", StageStep.RECEIVED, StageStep.STARTED),
        Phase("decode", StageStep.STARTED, StageStep.DECODED, "engine"),
        Phase("park", StageStep.DECODED, StageStep.RELAYED),
        Phase("begin", StageStep.DECODED, StageStep.BEGUN, "engine"),
        Phase("build", StageStep.BEGUN, StageStep.BUILT, "engine"),
        Phase("compute", StageStep.BUILT, StageStep.COMPUTED, "device"),
        Phase("read", StageStep.COMPUTED, StageStep.READ, "engine"),
        Phase("encode", StageStep.READ, StageStep.ENCODED, "engine"),
        Phase("write", StageStep.ENCODED, StageStep.WRITTEN),
    ),
    CoordinatorStep: (
        Phase("encode", CoordinatorStep.SCHEDULED, CoordinatorStep.ENCODED, "event loop"),
        Phase("write", CoordinatorStep.ENCODED, CoordinatorStep.WRITTEN),
        Phase("wait", CoordinatorStep.WRITTEN, CoordinatorStep.RECEIVED),
        Phase("decode", CoordinatorStep.RECEIVED, CoordinatorStep.DECODED, "event loop"),
        Phase("apply", CoordinatorStep.DECODED, CoordinatorStep.APPLIED, "event loop"),
        Phase("send next", CoordinatorStep.APPLIED, CoordinatorStep.SENT_NEXT, "event loop"),
        Phase("deliver", CoordinatorStep.SENT_NEXT, CoordinatorStep.DELIVERED, "event loop"),
    ),
}
"""The phases of a frame in a stage and in the coordinator, in order."""


@dataclass(frozen=True)
class Hop:
    """One frame between two processes, in nanoseconds of the coordinator's clock.

    It starts when the sender has encoded the frame, and ends when the receiver has its bytes. A `relay` is the message
    of the last stage to the first with the tokens after the frame.
    """

    number: int
    receiver: int
    name: str
    start: int
    end: int
    relay: bool = False


def hops(processes: Sequence[ProcessTrace]) -> Iterator[Hop]:
    """Yield the hops of all frames: coordinator to stage 0, between stages, back to the coordinator, and relays."""
    by_stage = {process.stage: process for process in processes}
    for receiver in processes:
        is_coordinator = receiver.stage == COORDINATOR
        sender = by_stage.get(max(by_stage) if is_coordinator else receiver.stage - 1)
        if sender is None or sender is receiver:
            continue
        left = CoordinatorStep.ENCODED if sender.stage == COORDINATOR else StageStep.ENCODED
        came = CoordinatorStep.RECEIVED if is_coordinator else StageStep.RECEIVED
        yield from _hops_between(sender, left, receiver, came)
    first, last = by_stage.get(0), by_stage[max(by_stage)] if by_stage else None
    if first is not None and last is not None and last is not first:
        left, came = StageStep.TOKENS_ENCODED, StageStep.TOKENS_RECEIVED
        for hop in _hops_between(last, left, first, came):
            yield replace(hop, relay=True)


def _hops_between(
    sender: ProcessTrace, left: IntEnum, receiver: ProcessTrace, came: IntEnum
) -> Iterator[Hop]:
    """Yield the hops of the frames whose step `left` at the sender and step `came` at the receiver took place."""
    sent = {(frame.epoch, frame.number): frame.times[left] for frame in sender.frames}
    for frame in receiver.frames:
        start, end = sent.get((frame.epoch, frame.number), 0), frame.times[came]
        if start and end:
            yield Hop(frame.number, receiver.stage, receiver.name, start, end)


def phase_times(process: ProcessTrace) -> Iterator[tuple[FrameTimes, Phase, int, int]]:
    """Yield the phases of all frames, each with its start and its end in nanoseconds.

    A stage that runs ahead builds a frame while the device computes the frame before. The device computes one frame at
    a time, so `compute` starts after the frame before it at the earliest.
    """
    computed = 0
    for frame in process.frames:
        for phase in PHASES[process.steps]:
            start, end = frame.times[phase.start], frame.times[phase.end]
            if not start or not end:
                continue
            if process.steps is StageStep and phase.end == StageStep.COMPUTED:
                start, computed = max(start, computed), end
            if process.steps is StageStep and phase.end == StageStep.BEGUN:
                start = max(start, frame.times[StageStep.RELAYED])
            yield frame, phase, start, end


def step_table(processes: Sequence[ProcessTrace]) -> str:
    """Return a table of the median and the 90th percentile of every phase and hop, in milliseconds."""
    rows = [f"{'process':<28} {'phase':<12} {'median ms':>10} {'p90 ms':>10} {'frames':>8}"]
    found = list(hops(processes))
    for process in processes:
        for name, relay in (("hop to it", False), ("relay to it", True)):
            to_it = (hop for hop in found if hop.receiver == process.stage and hop.relay == relay)
            rows += _row(process.name, name, [hop.end - hop.start for hop in to_it])
        durations: dict[str, list[int]] = {phase.name: [] for phase in PHASES[process.steps]}
        for _, phase, start, end in phase_times(process):
            durations[phase.name].append(end - start)
        for name, found_times in durations.items():
            rows += _row(process.name, name, found_times)
    return "\n".join(rows)


def _row(process: str, phase: str, times: Sequence[int]) -> list[str]:
    if len(times) < 2:
        return []
    p90 = quantiles(times, n=10)[-1]
    return [
        f"{process:<28} {phase:<12} {median(times) / 1e6:>10.3f} {p90 / 1e6:>10.3f} {len(times):>8}"
    ]


Event = dict[str, Any]


def chrome_trace(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """Return a trace as the JSON object of Chrome's trace format. Times are microseconds."""
    events: list[Event] = []
    for process in processes:
        pid = process.stage + 1
        phases = PHASES[process.steps]
        tracks = list(dict.fromkeys(phase.track for phase in phases if phase.track))
        named = [
            ("process_name", 0, "name", process.name),
            ("process_sort_index", 0, "sort_index", pid),
        ]
        named += [("thread_name", tid, "name", track) for tid, track in enumerate(tracks)]
        for kind, tid, key, value in named:
            events.append({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}})
        for frame, phase, start, end in phase_times(process):
            arguments = {"frame": frame.number, "epoch": frame.epoch, "rows": frame.rows}
            if not phase.track:
                events += _pair(phase.name, "queue", pid, frame.number, start, end, arguments)
                continue
            common = {"name": phase.name, "ph": "X", "pid": pid, "tid": tracks.index(phase.track)}
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            events.append({**common, **times, "args": arguments})
    for hop in hops(processes):
        kind = "relay" if hop.relay else "hop"
        name, pid = f"{kind} to {hop.name}", hop.receiver + 1
        events += _pair(name, kind, pid, hop.number, hop.start, hop.end, {"frame": hop.number})
    clocks = {
        process.name: {"offset_ns": process.clock.offset_ns, "error_ns": process.clock.error_ns}
        for process in processes
        if process.stage != COORDINATOR
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _pair(
    name: str, category: str, pid: int, number: int, start: int, end: int, arguments: Event
) -> list[Event]:
    """Return the two events of an interval that may overlap others."""
    common = {"name": name, "cat": category, "pid": pid, "tid": 0, "id": number}
    return [
        {**common, "ph": "b", "ts": start / 1000, "args": arguments},
        {**common, "ph": "e", "ts": end / 1000},
    ]
