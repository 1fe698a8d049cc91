"""The times between the steps of a frame: the phases in each process, the hops between them, and a table of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import median, quantiles

from coordinator.frame_trace.process_trace import COORDINATOR, FrameTimes, ProcessTrace
from proto.frame_stamps import CoordinatorStep, StageStep


@dataclass(frozen=True)
class Phase:
    """The time between two steps of one process."""

    name: str
    start: IntEnum
    end: IntEnum


PHASES: dict[type[IntEnum], tuple[Phase, ...]] = {
    StageStep: (
        Phase("queue", StageStep.RECEIVED, StageStep.STARTED),
        Phase("decode", StageStep.STARTED, StageStep.DECODED),
        Phase("park", StageStep.DECODED, StageStep.RELAYED),
        Phase("begin", StageStep.DECODED, StageStep.BEGUN),
        Phase("build", StageStep.BEGUN, StageStep.BUILT),
        Phase("compute", StageStep.BUILT, StageStep.COMPUTED),
        Phase("read", StageStep.COMPUTED, StageStep.READ),
        Phase("encode", StageStep.READ, StageStep.ENCODED),
        Phase("write", StageStep.ENCODED, StageStep.WRITTEN),
    ),
    CoordinatorStep: (
        Phase("encode", CoordinatorStep.SCHEDULED, CoordinatorStep.ENCODED),
        Phase("write", CoordinatorStep.ENCODED, CoordinatorStep.WRITTEN),
        Phase("wait", CoordinatorStep.WRITTEN, CoordinatorStep.RECEIVED),
        Phase("decode", CoordinatorStep.RECEIVED, CoordinatorStep.DECODED),
        Phase("apply", CoordinatorStep.DECODED, CoordinatorStep.APPLIED),
        Phase("send next", CoordinatorStep.APPLIED, CoordinatorStep.SENT_NEXT),
        Phase("deliver", CoordinatorStep.SENT_NEXT, CoordinatorStep.DELIVERED),
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
