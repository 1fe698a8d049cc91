"""The event stream of the page: a snapshot, then what changed, to any number of pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.status.cluster_status import ClusterStatus, NodeStatus
from coordinator.status.history import SAMPLE_SECONDS, LatencyLog
from coordinator.web import live_feed
from coordinator.web.live_feed import LiveFeed
from proto.errors import CapacityError
from proto.frame import Frame, Outcome, Segment

SECONDS = 20.0


@dataclass
class ChangingStatus:
    """A status source that tests change. `now` is the clock of the feed."""

    current: ClusterStatus = field(default_factory=lambda: ClusterStatus(ready=True, model="tiny"))
    now: float = 0.0

    def status(self) -> ClusterStatus:
        return self.current

    def feed(self) -> LiveFeed:
        """Return a feed that looks only when a test calls `publish_changes`."""
        feed = LiveFeed(self, LatencyLog(), lambda: self.now)
        feed.start = lambda: None  # type: ignore[method-assign]
        return feed


def parse(message: bytes) -> tuple[str, dict[str, Any]]:
    """Return the name and the data of one event."""
    name, data, *rest = message.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def read(stream: AsyncGenerator[bytes, None]) -> tuple[str, dict[str, Any]]:
    async with asyncio.timeout(SECONDS):
        return parse(await anext(stream))


async def opened() -> tuple[ChangingStatus, LiveFeed, AsyncGenerator[bytes, None]]:
    """Return a source, its feed, and the stream of a page that has its snapshot."""
    source = ChangingStatus()
    feed = source.feed()
    stream = feed.subscribe()
    name, data = await read(stream)
    assert (name, data["status"]["model"]) == ("snapshot", "tiny")
    return source, feed, stream


async def test_a_page_gets_a_snapshot_and_then_only_changes() -> None:
    """The delta holds the changed fields and nothing else."""
    source, feed, stream = await opened()
    feed.publish_changes()
    source.current = ClusterStatus(ready=True, model="tiny", running=2)
    feed.publish_changes()
    name, data = await read(stream)
    assert name == "delta"
    assert data == {"status": {"running": 2, "activity": "Generating 2 answers"}}
    await stream.aclose()
    assert len(feed.subscribers) == 0


async def test_the_number_of_pages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page above the bound is refused, and one that is gone leaves room."""
    monkeypatch.setattr(live_feed, "MAX_SUBSCRIBERS", 2)
    feed = ChangingStatus().feed()
    first, second = feed.subscribe(), feed.subscribe()
    await read(first)
    await read(second)
    with pytest.raises(CapacityError, match="are open"):
        feed.subscribe()
    await first.aclose()
    await read(feed.subscribe())


async def test_pages_share_one_encoded_message() -> None:
    """Ten pages cost one look at the status and one encoding."""
    source = ChangingStatus()
    feed = source.feed()
    streams = [feed.subscribe() for _ in range(10)]
    for stream in streams:
        await read(stream)
    source.current = ClusterStatus(ready=True, model="tiny", running=1)
    feed.publish_changes()
    async with asyncio.timeout(SECONDS):
        messages = [await anext(stream) for stream in streams]
    assert len({id(message) for message in messages}) == 1


async def test_a_slow_page_gets_a_new_snapshot() -> None:
    """A page that does not read holds a bounded number of messages, and then has the present state."""
    source, feed, stream = await opened()
    for running in range(1, live_feed.QUEUED_MESSAGES + 4):
        source.current = ClusterStatus(ready=True, model="tiny", running=running)
        feed.publish_changes()
    name, data = await read(stream)
    state = data["status"]
    assert name == "snapshot"
    while state["running"] < live_feed.QUEUED_MESSAGES + 3:
        name, data = await read(stream)
        assert name == "delta"
        assert data["status"]["running"] == state["running"] + 1
        state.update(data["status"])


async def test_history_and_events_reach_open_pages_and_later_ones() -> None:
    """A sample a second, and an event for each change of the cluster."""
    source, feed, first = await opened()
    feed.publish_changes()
    source.now = 1.5
    lost = NodeStatus("mac-1", "10.0.0.1:7000", health="lost", detail="silent")
    source.current = ClusterStatus(ready=True, model="tiny", nodes=(lost,))
    feed.publish_changes()
    _, delta = await read(first)
    assert [event["text"] for event in delta["events"]] == ["mac-1 was lost: silent"]
    assert len(delta["history"]) == 1
    _, snapshot = await read(feed.subscribe())
    assert snapshot["events"] == delta["events"]
    assert snapshot["history"] == delta["history"]


async def test_the_feed_looks_by_itself_and_survives_a_fault() -> None:
    """A status that raises once is logged, and the next look continues."""
    source = ChangingStatus()
    feed = LiveFeed(source, LatencyLog(), lambda: source.now)
    stream = feed.subscribe()
    await read(stream)
    good, calls = source.current, 0

    def status() -> ClusterStatus:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("broken")
        return ClusterStatus(ready=True, model=good.model, running=3)

    source.status = status  # type: ignore[method-assign]
    _, delta = await read(stream)
    assert delta["status"]["running"] == 3
    feed.close()


def record_window(feed: LiveFeed, returned_at: float) -> None:
    """Record a returned window of 3 rows, one of them rejected."""
    segment, outcome = Segment(1, 1, 3, (4, 5, 6), open=True), Outcome(1, 1, 2, 9)
    frame = Frame(1, 0, segments=(segment,), outcomes=(outcome,), stage_us=(1000, 2000))
    feed.frames.record_frame(frame, returned_at - 0.01, returned_at)


async def test_frames_reach_each_page_once() -> None:
    """Open pages get new frames, a later page the last ones, and none comes twice."""
    feed = ChangingStatus().feed()
    record_window(feed, 1.01)
    first = feed.subscribe()
    _, snapshot = await read(first)
    feed.publish_changes()
    _, delta = await read(first)
    record_window(feed, 1.11)
    second = feed.subscribe()
    _, late = await read(second)
    feed.publish_changes()
    _, both = await read(second)
    assert snapshot.get("frames") == []
    assert [frame[:4] for frame in delta["frames"]] == [[1, "w", 3, 1]]
    assert [frame[0] for frame in late["frames"]] == [1]
    assert [frame[:4] for frame in both["frames"]] == [[2, "w", 3, 1]]
    assert len(both["frames"][0]) == 6 + 2 * 2


async def test_requests_reach_pages_while_open_and_once_they_ended() -> None:
    """Open requests come once a second with their tokens, and each ended request once."""
    source, feed, stream = await opened()
    first = feed.requests.begin_request("chat", 5.0)
    feed.publish_changes()
    source.now += SAMPLE_SECONDS
    first.tokens = 3
    feed.publish_changes()
    _, delta = await read(stream)
    while "open_requests" not in delta:
        _, delta = await read(stream)
    assert [one["tokens"] for one in delta["open_requests"]] == [3]
    feed.requests.end_request(first, "stop", 1.5)
    source.now += SAMPLE_SECONDS
    feed.publish_changes()
    _, delta = await read(stream)
    assert delta["open_requests"] == []
    assert [(one["number"], one["outcome"]) for one in delta["ended_requests"]] == [(1, "stop")]
    source.now += SAMPLE_SECONDS
    feed.publish_changes()
    _, delta = await read(stream)
    assert "ended_requests" not in delta
    await stream.aclose()
