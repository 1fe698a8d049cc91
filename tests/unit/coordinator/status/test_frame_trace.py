"""Tests of the frame trace: aligned clocks, phases and hops, Chrome's format, and the ring of stamps."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from coordinator.status.frame_trace import (
    COORDINATOR,
    FrameTimes,
    ProcessTrace,
    RoundTrip,
    chrome_trace,
    clock_offset,
    hops,
    process_trace,
    step_table,
)
from proto import frame_stamps
from proto.frame_stamps import CoordinatorStep, StageStep, StampRing

MS = 10**6


def traces(frames: int = 3, stages: int = 2) -> list[ProcessTrace]:
    """Return traces in which every step takes 1 ms, every hop 2 ms and every relay 4 ms."""
    own: list[FrameTimes] = []
    found: list[list[FrameTimes]] = [[] for _ in range(stages)]
    for number in range(frames):
        start = 1_000 * MS + number * 100 * MS
        at = start + 1 * MS  # encoded
        for stage in range(stages):
            received = at + 2 * MS
            times = [received + step * MS for step in StageStep]
            times[StageStep.TOKENS_ENCODED] = times[StageStep.TOKENS_RECEIVED] = 0
            found[stage].append(FrameTimes(1, number, 1, tuple(times)))
            at = times[StageStep.ENCODED]
        if stages > 1:
            relay(found[0][-1], StageStep.TOKENS_RECEIVED, at + 4 * MS, found[0])
            relay(found[-1][-1], StageStep.TOKENS_ENCODED, at, found[-1])
        came = at + 2 * MS
        after = [came + step * MS for step in range(5)]
        own.append(FrameTimes(1, number, 1, (start, start + MS, start + 2 * MS, *after)))
    stage_traces = [ProcessTrace(f"stage {i}", i, tuple(one)) for i, one in enumerate(found)]
    return [ProcessTrace("coordinator", COORDINATOR, tuple(own)), *stage_traces]


def relay(frame: FrameTimes, step: StageStep, at: int, frames: list[FrameTimes]) -> None:
    """Set a step of the newest of `frames`, which is `frame`."""
    times = list(frame.times)
    times[step] = at
    frames[-1] = replace(frame, times=tuple(times))


def test_relays_join_the_last_stage_and_the_first() -> None:
    """Each frame whose tokens the last stage has relayed has a hop of its own, in the table and in Chrome's trace."""
    found = [hop for hop in hops(traces(stages=3)) if hop.relay]
    assert [(hop.number, hop.receiver.stage, hop.end - hop.start) for hop in found] == [
        (number, 0, 4 * MS) for number in range(3)
    ]
    rows = [line.split() for line in step_table(traces()).splitlines()]
    assert ["stage", "0", "relay", "to", "it", "4.000", "4.000", "3"] in rows
    names = [event["name"] for event in chrome_trace(traces())["traceEvents"]]
    assert names.count("relay to stage 0") == 6
    assert not any(hop.relay for hop in hops(traces(stages=1)))
    assert not list(hops([]))


def test_hops_join_the_processes() -> None:
    """Each frame has a hop to every stage and one back, from the sender's encoding to the receiver."""
    found = [hop for hop in hops(traces()) if not hop.relay]
    assert sorted({hop.receiver.stage for hop in found}) == [COORDINATOR, 0, 1]
    assert len(found) == 9
    assert {hop.end - hop.start for hop in found} == {2 * MS}


def test_a_table_has_the_median_of_every_phase() -> None:
    """The table names each process with its phases, and gives milliseconds."""
    rows = [line.split() for line in step_table(traces()).splitlines()]
    assert ["stage", "1", "compute", "1.000", "1.000", "3"] in rows
    assert ["stage", "0", "hop", "to", "it", "2.000", "2.000", "3"] in rows


def test_a_step_that_did_not_take_place_has_no_phase() -> None:
    """A frame whose segments are all invalidated is not computed, and shows no such slice."""
    own, stage = traces(frames=2, stages=1)
    skipped = list(stage.frames[0].times)
    skipped[StageStep.COMPUTED] = 0
    frames = (FrameTimes(1, 0, 0, tuple(skipped)), *stage.frames[1:])
    events = chrome_trace([own, ProcessTrace("stage 0", 0, frames)])["traceEvents"]
    numbers = [e["args"]["frame"] for e in events if e["name"] == "compute"]
    assert numbers == [1]


def test_the_device_computes_one_frame_at_a_time() -> None:
    """Frames of a stage that runs ahead overlap on the host, and follow each other on the track of the device."""
    own, _ = traces(frames=1, stages=1)
    begun = range(1_000 * MS, 1_040 * MS, 10 * MS)
    frames = tuple(
        FrameTimes(1, n, 1, tuple(at + ms * MS for ms in (0, 1, 2, 2, 3, 5, 17, 18, 19, 20)))
        for n, at in enumerate(begun)
    )
    ahead = [own, ProcessTrace("stage 0", 0, frames)]
    computed = [e for e in chrome_trace(ahead)["traceEvents"] if e["name"] == "compute"]
    assert {e["tid"] for e in computed} == {1}
    assert [e["dur"] for e in computed] == [12_000, 10_000, 10_000, 10_000]
    (row,) = [line.split() for line in step_table(ahead).splitlines() if "compute" in line]
    assert row[3] == "10.000"


def test_chrome_gets_slices_and_pairs() -> None:
    """Slices of one track never overlap, intervals that may overlap come in pairs, and all is JSON."""
    events = json.loads(json.dumps(chrome_trace(traces())))["traceEvents"]
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            track = by_track.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
    for track in by_track.values():
        ordered = sorted(track)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    begins = [e for e in events if e["ph"] == "b"]
    ends = [e for e in events if e["ph"] == "e"]
    assert len(begins) == len(ends) > 0
    assert {e["name"] for e in begins} >= {"queue", "write", "hop to stage 1", "hop to coordinator"}


@pytest.mark.parametrize("offset", [0, 7_000 * MS, -3 * MS])
def test_clocks_are_aligned_within_half_of_the_shortest_round_trip(offset: int) -> None:
    """The clock of the same machine is known exactly."""
    trips = [
        RoundTrip(sent, sent + there + offset, sent + there + back)
        for sent, there, back in ((0, 300_000, 900_000), (10 * MS, 150_000, 100_000))
    ]
    assert abs(clock_offset(trips) - offset) <= (125_000 if offset else 0)


def test_frames_without_a_header_are_left_out_of_a_trace() -> None:
    """A queued frame has no number yet."""
    ring = StampRing()
    done, _ = (ring.add_frame(0, StageStep) for _ in range(2))
    done.name_frame(1, 0, 5)
    (frame,) = process_trace("stage 0", 0, ring.since(0)).frames
    assert frame == FrameTimes(1, 0, 5, tuple(done.times))


def test_a_ring_keeps_the_newest_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring is bounded, finds frames by number, and returns those since a moment, oldest first."""
    monkeypatch.setattr(frame_stamps, "RING_FRAMES", 4)
    ring = StampRing()
    for number in range(10):
        ring.add_frame(COORDINATOR, CoordinatorStep).name_frame(1, number, 1)
    assert [one.number for one in ring.since(0)] == [6, 7, 8, 9]
    assert ring.find_frame(1, 5) is None and ring.find_frame(2, 9) is None
    eight = ring.find_frame(1, 8)
    assert eight is not None
    assert [one.number for one in ring.since(eight.times[0])] == [8, 9]
