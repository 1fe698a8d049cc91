"""The cost of one more entry does not grow with what the stores of the cluster, its status and its stages have."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.membership import ManagerOptions, Membership
from coordinator.cluster.view import Settings, View
from coordinator.pipeline.remote_pipeline import StallDetector
from coordinator.pipeline.worker_connection import Candidate
from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from coordinator.status.frame_records import FrameRecords
from coordinator.status.history import EventLog, History, LatencyLog, RequestLog
from proto import cluster_pb2 as pb
from proto.errors import WorkerLostError
from proto.frame import Frame, Outcome, Segment
from proto.frame_stamps import StageStep, StampRing
from proto.stage_options import StageOptions
from worker.engine.frame_times import FrameTimes

FEW, MANY = 100, 100_000
MORE_THAN_KEPT = 10_000
"""Entries of a store with a bound, which is lower."""

Use = Callable[[int], object]
"""Adds an entry with a number, and reads what a server reads then."""


def frame(number: int) -> Frame:
    """Return a returned frame with one window."""
    segments, outcomes = (Segment(0, number, number, (1,), open=True),), (Outcome(0, number, 1, token=1),)
    return Frame(1, number, (), segments, outcomes, stage_us=(100, 100))


def open_requests() -> Use:
    """Use requests that stay open, with one that ends."""
    log = RequestLog()

    def use(number: int) -> None:
        log.begin_request("/v1/chat/completions", number)
        log.end_request(log.begin_request("/v1/completions", number), "stop", 1.0)
        assert len(log.open_requests()) <= FEW

    return use


def frames() -> Use:
    """Use the records and stamps of frames, and the times of a stage."""
    records, stamps, stall, times = FrameRecords(), StampRing(), StallDetector(2), FrameTimes()

    def use(number: int) -> None:
        returned = frame(number)
        stamps.add_frame(0, StageStep).name_frame(1, number, 1)
        stall.record_sent(number)
        records.record_frame(returned, number, number + 0.1, tokens=1)
        stall.record_returned(number)
        times.record_end(returned, returned)
        assert times.deadlines.seconds(returned) > 0
        assert stamps.find_frame(1, number)
        assert len(records.since(records.count - 1)) == 1

    return use


def statuses() -> Use:
    """Use the history of a cluster whose machines and plans change each second."""
    latency, events = LatencyLog(), EventLog()
    history = History(latency)

    def use(number: int) -> None:
        latency.tokens += 1
        latency.answers.append((number * 60.0, 0.1))
        latency.gaps.append(0.1)
        node = NodeStatus(f"w{number}", f"10.0.0.1:{number}", health="lost" if number % 2 else "ready")
        status = ClusterStatus(True, "m", epoch=number, nodes=(node,), recoveries=number)
        events.record_status(status, number)
        history.record_status(status, number * 60.0, number * 60.0)

    return use


def candidates() -> Use:
    """Use workers that are silent, each at another address."""
    options, view = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings()), View(Settings())
    membership = Membership(SimpleNamespace(options=StageOptions()), options, lambda: view, print, print)  # type: ignore[arg-type]
    background: Any = SimpleNamespace(spawn=lambda work: work.close())
    membership._background = background

    def use(number: int) -> None:
        candidate = Candidate(f"w{number}", (f"w:{number}",))
        membership._ask_candidates([candidate])
        membership._record_silence(candidate, f"w:{number}", WorkerLostError("no answer"))

    return use


def seconds(use: Use, first: int) -> float:
    """Return the processor time of one use, the shortest of several."""
    found = []
    for number in range(first, first + 30):
        began = time.thread_time()
        use(number)
        found.append(time.thread_time() - began)
    return min(found)


@pytest.mark.parametrize(
    ("store", "many"),
    [(open_requests, MANY), (candidates, MANY), (frames, MORE_THAN_KEPT), (statuses, MORE_THAN_KEPT)],
)
def test_one_more_costs_what_the_first_ones_did(
    store: Callable[[], Use], many: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With 100,000 entries one more takes at most twice the processor time that it takes with 100."""
    caplog.set_level("CRITICAL")
    use = store()
    for number in range(FEW):
        use(number)
    few = seconds(use, FEW)
    for number in range(2 * FEW, many):
        use(number)
    assert seconds(use, many) <= 2 * few + 5e-6
