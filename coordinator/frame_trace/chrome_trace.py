"""Chrome's trace format, which https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.frame_trace.process_trace import COORDINATOR, ProcessTrace
from coordinator.frame_trace.step_times import hops, phase_times

Event = dict[str, Any]


def chrome_trace(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """Return a trace as the JSON object of Chrome's trace format. Times are microseconds."""
    events: list[Event] = []
    for process in processes:
        pid = process.stage + 1
        events.append(_named("process_name", pid, 0, process.name))
        events.append(_named("process_sort_index", pid, 0, pid))
        for tid, (track, _) in enumerate(_tracks(process)):
            events.append(_named("thread_name", pid, tid, track))
        events += _slices(process)
    for hop in hops(processes):
        pid = hop.receiver + 1
        arguments = {"frame": hop.number}
        kind = "relay" if hop.relay else "hop"
        name = f"{kind} to {hop.name}"
        events += _pair(name, kind, pid, hop.number, hop.start, hop.end, arguments)
    clocks = {
        process.name: {"offset_ns": process.clock.offset_ns, "error_ns": process.clock.error_ns}
        for process in processes
        if process.stage != COORDINATOR
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _tracks(process: ProcessTrace) -> list[tuple[str, set[str]]]:
    """Return the tracks of a process: a name, and the phases that it shows."""
    if process.stage == COORDINATOR:
        return [("event loop", {"encode", "decode", "apply", "send next", "deliver"})]
    return [("engine", {"decode", "begin", "build", "read", "encode"}), ("device", {"compute"})]


def _slices(process: ProcessTrace) -> list[Event]:
    pid = process.stage + 1
    events: list[Event] = []
    tracks = {name: tid for tid, (_, names) in enumerate(_tracks(process)) for name in names}
    for frame, phase, start, end in phase_times(process):
        arguments = {"frame": frame.number, "epoch": frame.epoch, "rows": frame.rows}
        if phase.name in tracks:
            events.append(
                {
                    "name": phase.name,
                    "ph": "X",
                    "pid": pid,
                    "tid": tracks[phase.name],
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "args": arguments,
                }
            )
        else:
            events += _pair(phase.name, "queue", pid, frame.number, start, end, arguments)
    return events


def _pair(
    name: str, category: str, pid: int, number: int, start: int, end: int, arguments: Event
) -> list[Event]:
    """Return the two events of an interval that may overlap others."""
    common = {"name": name, "cat": category, "pid": pid, "tid": 0, "id": number}
    return [
        {**common, "ph": "b", "ts": start / 1000, "args": arguments},
        {**common, "ph": "e", "ts": end / 1000},
    ]


def _named(kind: str, pid: int, tid: int, value: str | int) -> Event:
    key = "sort_index" if kind == "process_sort_index" else "name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}}
