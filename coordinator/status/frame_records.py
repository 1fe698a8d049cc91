"""The records of the newest frames, and their trace through all processes.

Rates, acceptance, stage times, timeline and log derive from the records. A record is made when its frame returns. While
a page is open, the stamps of all processes add the exact times at which each stage worked. A trace has aligned clocks
and the times between steps, and is written in Chrome's format, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

from coordinator.drafts.search import DraftCounts, DraftResult
from proto.errors import ClusterError
from proto.frame import DropPrefix, Frame, Outcome, Segment
from proto.frame_stamps import CoordinatorStep, FrameStamps, StageStep

log = logging.getLogger(__name__)

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
class ClockOffset:
    """A process's clock minus the coordinator's, in nanoseconds. The true value differs by at most `error_ns`."""

    offset_ns: int = 0
    error_ns: int = 0

    def align_times(self, epoch: int, number: int, rows: int, times: Iterable[int]) -> FrameTimes:
        """Return the times of a frame in this clock as times of the coordinator's clock."""
        aligned = tuple(moment and moment - self.offset_ns for moment in times)
        return FrameTimes(epoch, number, rows, aligned)


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


def process_trace(name: str, stage: int, stamps: Sequence[FrameStamps]) -> ProcessTrace:
    """Return the trace of a process with the coordinator's clock."""
    frames = (FrameTimes(s.epoch, s.number, s.rows, tuple(s.times)) for s in stamps if s.epoch)
    return ProcessTrace(name, stage, ClockOffset(), tuple(frames))


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

    It starts when the sender has encoded the frame, and ends when its bytes arrive. A `relay` has the next tokens.
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

    The device computes one frame at a time, so `compute` starts after the frame before it at the earliest.
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


def step_table(processes: Sequence[ProcessTrace], sums: Mapping[int, float]) -> str:
    """Return a table of the median and the 90th percentile of every phase and hop, in milliseconds.

    `sums` are the milliseconds of the sums over a group's members in a decode step, by stage. They are a part of
    `compute`, and at most as long as measured in a chain, because the device may do other work beside them.
    """
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
            if name == "compute" and found_times and (most := sums.get(process.stage)):
                share = most * 1e6 / median(found_times)
                rows.append(
                    f"{process.name:<28} {'sums <=':<12} {most:>10.3f} {min(1.0, share):>10.0%}"
                )
    return "\n".join(rows)


def _row(process: str, phase: str, times: Sequence[int]) -> list[str]:
    if len(times) < 2:
        return []
    middle, p90 = median(times) / 1e6, quantiles(times, n=10)[-1] / 1e6
    return [f"{process:<28} {phase:<12} {middle:>10.3f} {p90:>10.3f} {len(times):>8}"]


Event = dict[str, Any]


def chrome_trace(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """Return a trace as the JSON object of Chrome's trace format. Times are microseconds."""
    events: list[Event] = []
    for process in processes:
        pid = process.stage + 1
        tracks = list(dict.fromkeys(phase.track for phase in PHASES[process.steps] if phase.track))
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
    clocks = {one.name: asdict(one.clock) for one in processes if one.stage != COORDINATOR}
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


frame_log = logging.getLogger("coordinator.frames")
"""One debug record for each frame that returns. CONTRIBUTING.md explains how to read it."""

MAX_RECORDS = 4000
"""Records kept: 20 seconds at 200 frames a second."""

RATE_SECONDS = 10.0
"""Seconds. Period over which tokens per second are averaged."""

STEPS = 20
"""Decode steps over which the time of a stage is averaged."""

DEADLINE_SECONDS = 1.0
"""Seconds. Bounds one collection of stamps. Frames without it stay without exact times."""

SLOW = 1.15
"""A stage whose decode step takes this multiple of the mean, or more, is marked as the slowest one."""

MARGIN_SECONDS = 0.05
"""Seconds. A frame reaches its first stage after it was sent, but clocks of machines differ a little."""

FrameKey = tuple[int, int]
"""The epoch and the number of a frame."""

StageSpans = tuple[tuple[float, float], ...]
"""Start and end of each stage's work, in seconds on the loop's clock."""

FrameKind = Literal["prompt", "decode", "window", "speculative", "invalidated"]

CollectTraces = Callable[[float], Awaitable[list[ProcessTrace]]]
"""A function that returns the traces of all processes over the last seconds."""


@dataclass
class FrameRecord:
    """One returned frame. `number` counts all records since the start. Times are seconds on the loop's clock.

    `wasted` of its `rows` were rejected or invalidated. `stages` is empty until the stamps of the stages have come.
    """

    number: int
    key: FrameKey
    kind: FrameKind
    rows: int
    wasted: int
    tokens: int
    sent_at: float
    returned_at: float
    stage_us: tuple[int, ...]
    stages: StageSpans = ()


@dataclass(frozen=True)
class StageLoad:
    """The load of one stage of the plan.

    `step_ms` is the mean time of its last decode steps, None without one. `busy` is the fraction of the last
    RATE_SECONDS in which it computed, 0 to 1. `slowest` says that the other stages wait for it.
    """

    step_ms: float | None
    busy: float
    slowest: bool = False


@dataclass
class FrameRecords:
    """The last MAX_RECORDS records, oldest first, and the counts of drafts since the start."""

    records: deque[FrameRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    count: int = 0
    """Records since the start."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    matched: DraftCounts = field(default_factory=DraftCounts)
    """The counts of drafts from the text."""

    def record_frame(
        self,
        frame: Frame,
        sent_at: float,
        now: float,
        *,
        speculative: bool = False,
        tokens: int = 0,
        draft_results: Iterable[DraftResult] = (),
        matched_results: Sequence[DraftResult] = (),
    ) -> None:
        """Record a returned frame. `speculative` says that its windows were sent on unverified ones."""
        self.drafts.record_drafts(draft_results)
        self.matched.record_drafts(matched_results)
        _log_frame(frame)
        if not frame.segments:  # only operations, such as the end of a sequence
            return
        pairs = list(zip(frame.segments, frame.outcomes, strict=True))
        rows = sum(segment.width for segment in frame.segments)
        kept = sum(0 if outcome.cancelled else outcome.accepted_length for _, outcome in pairs)
        kind = _kind_of(frame, speculative=speculative)
        self.count += 1
        key, wasted, us = (frame.epoch, frame.number), rows - kept, frame.stage_us
        record = FrameRecord(self.count, key, kind, rows, wasted, tokens, sent_at, now, us)
        self.records.append(record)

    # ---- figures

    def tokens_per_second(self, now: float) -> float:
        """Return the rate over the last RATE_SECONDS, or since the first token of that period."""
        tokens, first = 0, now
        for record in reversed(self.records):
            if record.returned_at < now - RATE_SECONDS:
                break
            if record.tokens:
                tokens, first = tokens + record.tokens, record.returned_at
        return tokens / max(now - first, 0.1)

    def stage_loads(self, epoch: int, now: float) -> tuple[StageLoad, ...]:
        """Return the loads of the stages of plan `epoch`, from the same frames; empty before its first frame."""
        steps: list[tuple[int, ...]] = []
        busy: list[float] = []
        for record in reversed(self.records):
            recent = record.returned_at > now - RATE_SECONDS
            if record.key[0] != epoch or (len(steps) == STEPS and not recent):
                break
            within = min(record.returned_at, now) - max(record.sent_at, now - RATE_SECONDS)
            busy = busy or [0.0] * len(record.stage_us)
            for stage, us in enumerate(record.stage_us[: len(busy)]):
                busy[stage] += min(us / 1e6, max(within, 0.0))
            if len(steps) < STEPS and record.tokens and record.kind != "prompt":
                steps.append(record.stage_us)
        times = [round(sum(us) / len(steps) / 1000, 3) for us in zip(*steps, strict=False)]
        shares = [round(min(seconds / RATE_SECONDS, 1.0), 2) for seconds in busy]
        slow = _slowest(times, shares)
        return tuple(
            StageLoad(times[i] if times else None, share, i == slow)
            for i, share in enumerate(shares)
        )

    def since(self, number: int, most: int = MAX_RECORDS) -> list[FrameRecord]:
        """Return the records after record `number`, at most the `most` newest."""
        missing = min(self.count - number, most, len(self.records))
        return [self.records[i] for i in range(len(self.records) - missing, len(self.records))]

    async def add_exact_times(self, after: int, collect: CollectTraces) -> None:
        """Collect the stamps once if records after number `after` lack their exact times."""
        waiting = [record for record in self.since(after) if not record.stages]
        if not waiting:
            return
        seconds = time.monotonic() - min(record.sent_at for record in waiting) + MARGIN_SECONDS
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                processes = await collect(seconds)
        except (ClusterError, TimeoutError) as error:  # the plan changes, or a worker is lost
            log.debug("no trace", extra={"error": str(error)})
            return
        exact = stage_spans(processes)
        for record in waiting:
            stages = exact.get(record.key, ())
            if len(stages) == len(record.stage_us):
                record.stages = stages


def _slowest(times: Sequence[float], shares: Sequence[float]) -> int | None:
    """Return the index of the stage for which the others wait, or None."""
    if len(times) < 2 or max(times) < SLOW * sum(times) / len(times):
        return None
    slowest = times.index(max(times))
    return slowest if shares[slowest] == max(shares) else None


def stage_spans(processes: Sequence[ProcessTrace]) -> dict[FrameKey, StageSpans]:
    """Return the start and end of each stage's work, in seconds, of the frames that all stages have finished."""
    stages = [process for process in processes if process.stage != COORDINATOR]
    stages.sort(key=lambda process: process.stage)
    found: dict[FrameKey, list[tuple[float, float]]] = {}
    for place, process in enumerate(stages):
        for frame in process.frames:
            start, end = frame.times[StageStep.STARTED], frame.times[StageStep.ENCODED]
            spans = found.setdefault((frame.epoch, frame.number), [])
            if start and end and len(spans) == place:
                spans.append((start / 1e9, end / 1e9))
    return {key: tuple(spans) for key, spans in found.items() if len(spans) == len(stages)}


def _kind_of(frame: Frame, *, speculative: bool) -> FrameKind:
    if all(outcome.cancelled for outcome in frame.outcomes):
        return "invalidated"
    if not all(segment.open for segment in frame.segments):
        return "prompt"
    if speculative:
        return "speculative"
    return "window" if any(segment.width > 1 for segment in frame.segments) else "decode"


# ---- the frame log: counts, positions and times, but no tokens, because these are the user's text


def _log_frame(frame: Frame) -> None:
    if not frame_log.isEnabledFor(logging.DEBUG):
        return
    done = zip(frame.segments, frame.outcomes, strict=True)
    numbers = (op.entry if isinstance(op, DropPrefix) else op.seq_id for op in frame.ops)
    ops = [f"{op.kind} {number}" for op, number in zip(frame.ops, numbers, strict=True)]
    facts: Event = {"epoch": frame.epoch, "number": frame.number, "rows": frame.rows}
    facts["stage_ms"] = "+".join(f"{us / 1000:.1f}" for us in frame.stage_us)
    facts["ops"] = ", ".join(ops)
    facts["segments"] = ", ".join(describe_segment(segment, outcome) for segment, outcome in done)
    frame_log.debug("frame", extra=facts)


def describe_segment(segment: Segment, outcome: Outcome) -> str:
    """Return one line about a segment, such as `3.12@140 accepted 2/4 drafts 3`.

    The example is window 12 of sequence 3 at position 140. Its accepted length is 2 of 4 tokens, and 3 drafts follow.
    A prompt chunk reads `3.0@0 prompt 512`. A window that builds on a rejected one is `invalidated`.
    """
    name = f"{segment.seq_id}.{segment.window}@{segment.position}"
    if outcome.cancelled:
        return f"{name} invalidated"
    if not segment.open:
        return f"{name} prompt {segment.width}" + (" sampled" if outcome.token is not None else "")
    return f"{name} accepted {outcome.accepted_length}/{segment.width} drafts {len(outcome.drafts)}"
