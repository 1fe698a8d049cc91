"""The live state of a cluster on the client's side of `/v1/events`, as `mtp-coord top` shows it. No I/O."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from proto.errors import ProtocolError

Json = dict[str, Any]

MAX_FRAMES = 4000
"""Frames kept: 20 seconds at 200 frames a second."""

MAX_SAMPLES = 600
"""Samples kept: ten minutes."""


@dataclass
class LiveView:
    """The state after a snapshot and its deltas. Frames and samples are in the compact form of the stream."""

    status: Json = field(default_factory=dict)
    events: deque[Json] = field(default_factory=lambda: deque(maxlen=100))
    history: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    frames: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=MAX_FRAMES))

    def apply(self, name: str, data: Json) -> None:
        """Apply one event. Raises ProtocolError for another event, or for a delta before the snapshot."""
        if name == "snapshot":
            self.status = {}
            for log in (self.events, self.history, self.frames):
                log.clear()
        elif name != "delta" or not self.status:
            raise ProtocolError(f"unexpected event {name!r} of /v1/events")
        self.status.update(data.get("status", {}))
        self.events.extend(data.get("events", ()))
        self.history.extend(data.get("history", ()))
        self.frames.extend(data.get("frames", ()))

    def computed_shares(self, seconds: float) -> list[float]:
        """Return the share of the last `seconds` before the newest frame in which each stage computed."""
        if not self.frames:
            return []
        newest = self.frames[-1]
        end = newest[4] + newest[5] / 1000
        busy = [0.0] * ((len(newest) - 6) // 2)
        for frame in reversed(self.frames):
            if frame[4] < end - seconds or (len(frame) - 6) // 2 != len(busy):
                break
            for stage in range(len(busy)):
                busy[stage] += frame[7 + 2 * stage] / 1000
        return [min(1.0, one / seconds) for one in busy]

    def wasted_share(self) -> float | None:
        """Return the share of the rows of all kept frames that were rejected or invalidated."""
        rows = sum(frame[2] for frame in self.frames)
        return sum(frame[3] for frame in self.frames) / rows if rows else None


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, Json]]:
    """Yield the name and the data of each event; comments are skipped. Raises ProtocolError for other lines."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            try:
                yield name, json.loads(line.removeprefix("data: "))
            except ValueError:
                raise ProtocolError("/v1/events: the data of an event are not JSON") from None
        elif line and not line.startswith(":"):
            raise ProtocolError("/v1/events: the answer is not an event stream")
