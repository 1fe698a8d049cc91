"""The trace of the newest frames through all processes, in the coordinator's clock.

A table has the median time of each step. Chrome's format is shown by https://ui.perfetto.dev.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median, quantiles
from typing import Any, NamedTuple

from proto.frame_stamps import CoordinatorStep, FrameStamps, StageStep

COORDINATOR = -1
"""Number of the coordinator among the stages of a trace."""


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
    frames: tuple[FrameTimes, ...]

    @property
    def steps(self) -> type[IntEnum]:
        """The steps that the times belong to."""
        return CoordinatorStep if self.stage == COORDINATOR else StageStep


def process_trace(name: str, stage: int, stamps: Sequence[FrameStamps]) -> ProcessTrace:
    """Return the trace of a process with the coordinator's clock."""
    frames = (FrameTimes(s.epoch, s.number, s.rows, tuple(s.times)) for s in stamps if s.epoch)
    return ProcessTrace(name, stage, tuple(frames))


class RoundTrip(NamedTuple):
    """One exchange: sent and received in the coordinator's clock, answered at `remote_ns` in the process's clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int


def clock_offset(round_trips: Sequence[RoundTrip]) -> int:
    """Return a process's clock minus the coordinator's, in nanoseconds.

    The answer was given somewhere within each round trip, so each one bounds the offset on both sides. Where the bounds
    of all round trips admit 0, both processes read the clock of the same machine and the offset is 0.
    """
    low = max(trip.remote_ns - trip.received_ns for trip in round_trips)
    high = min(trip.remote_ns - trip.sent_ns for trip in round_trips)
    return 0 if low <= 0 <= high else (low + high) // 2


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


class Hop(NamedTuple):
    """One frame between two processes, in nanoseconds of the coordinator's clock.

    It starts when the sender has encoded the frame, and ends when its bytes arrive. A `relay` has the next tokens.
    """

    number: int
    receiver: ProcessTrace
    start: int
    end: int
    relay: bool = False


def hops(processes: Sequence[ProcessTrace]) -> Iterator[Hop]:
    """Yield the hops of all frames: coordinator to stage 0, between stages, back to the coordinator, and relays."""
    by_stage = {process.stage: process for process in processes}
    last = by_stage[max(by_stage)] if by_stage else None
    for receiver in processes:
        is_coordinator = receiver.stage == COORDINATOR
        sender = last if is_coordinator else by_stage.get(receiver.stage - 1)
        came = CoordinatorStep.RECEIVED if is_coordinator else StageStep.RECEIVED
        yield from _hops_between(sender, receiver, came)
        if receiver.stage == 0:
            yield from _hops_between(last, receiver, StageStep.TOKENS_RECEIVED)


def _hops_between(sender: ProcessTrace | None, receiver: ProcessTrace, came: IntEnum) -> Iterator[Hop]:
    """Yield the hops of the frames that `sender` has encoded and whose step `came` took place at the receiver."""
    if sender is None or sender is receiver:
        return
    relay = came is StageStep.TOKENS_RECEIVED
    left = CoordinatorStep.ENCODED if sender.stage == COORDINATOR else StageStep.ENCODED
    step = StageStep.TOKENS_ENCODED if relay else left
    sent = {(frame.epoch, frame.number): frame.times[step] for frame in sender.frames}
    for frame in receiver.frames:
        start, end = sent.get((frame.epoch, frame.number), 0), frame.times[came]
        if start and end:
            yield Hop(frame.number, receiver, start, end, relay)


def phase_times(process: ProcessTrace) -> Iterator[tuple[FrameTimes, Phase, int, int]]:
    """Yield the phases of all frames, each with its start and its end in nanoseconds.

    The device computes one frame at a time, so `compute` starts after the frame before it at the earliest.
    """
    computed = 0
    for frame in process.frames:
        for phase in PHASES[process.steps]:
            start, end = frame.times[phase.start], frame.times[phase.end]
            if not start or not end:
                continue
            if phase.name == "compute":
                start, computed = max(start, computed), end
            if phase.name == "begin":
                start = max(start, frame.times[StageStep.RELAYED])
            yield frame, phase, start, end


def step_table(processes: Sequence[ProcessTrace]) -> str:
    """Return a table of the median and the 90th percentile of every phase and hop, in milliseconds."""
    rows = [f"{'process':<28} {'phase':<12} {'median ms':>10} {'p90 ms':>10} {'frames':>8}"]
    found = list(hops(processes))
    for process in processes:
        to_it = [hop for hop in found if hop.receiver is process]
        durations: dict[str, list[int]] = {
            "hop to it": [hop.end - hop.start for hop in to_it if not hop.relay],
            "relay to it": [hop.end - hop.start for hop in to_it if hop.relay],
            **{phase.name: [] for phase in PHASES[process.steps]},
        }
        for _, phase, start, end in phase_times(process):
            durations[phase.name].append(end - start)
        for name, times in durations.items():
            if len(times) > 1:
                middle, p90 = median(times) / 1e6, quantiles(times, n=10)[-1] / 1e6
                rows.append(f"{process.name:<28} {name:<12} {middle:>10.3f} {p90:>10.3f} {len(times):>8}")
    return "\n".join(rows)


Event = dict[str, Any]


def chrome_trace(processes: Sequence[ProcessTrace]) -> Event:
    """Return a trace as the JSON object of Chrome's trace format. Times are microseconds."""
    events: list[Event] = []
    for process in processes:
        pid = process.stage + 1
        tracks = list(dict.fromkeys(phase.track for phase in PHASES[process.steps] if phase.track))
        named = [("process_name", 0, process.name)]
        named += [("thread_name", tid, track) for tid, track in enumerate(tracks)]
        events += [
            {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}} for kind, tid, name in named
        ]
        for frame, phase, start, end in phase_times(process):
            arguments = {"frame": frame.number, "epoch": frame.epoch, "rows": frame.rows}
            if not phase.track:
                events += _pair(phase.name, "queue", pid, frame.number, start, end, arguments)
                continue
            common = {"name": phase.name, "ph": "X", "pid": pid, "tid": tracks.index(phase.track)}
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            events.append({**common, **times, "args": arguments})
    for hop in hops(processes):
        kind, pid = "relay" if hop.relay else "hop", hop.receiver.stage + 1
        name, arguments = f"{kind} to {hop.receiver.name}", {"frame": hop.number}
        events += _pair(name, kind, pid, hop.number, hop.start, hop.end, arguments)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _pair(name: str, category: str, pid: int, number: int, start: int, end: int, arguments: Event) -> list[Event]:
    """Return the two events of an interval that may overlap others."""
    common = {"name": name, "cat": category, "pid": pid, "tid": 0, "id": number}
    return [{**common, "ph": "b", "ts": start / 1000, "args": arguments}, {**common, "ph": "e", "ts": end / 1000}]
