"""The page: its files, and its feed, a snapshot for each new subscriber and then changes, encoded once for all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from coordinator.status import history
from coordinator.status.cluster_status import ClusterStatus, StatusSource
from coordinator.status.frame_records import FrameRecord, FrameRecords
from proto.errors import CapacityError

log = logging.getLogger(__name__)


def describe_activity(status: ClusterStatus) -> str:
    """Return what the cluster does now, such as `Computing prompts: 704 of 2,812 tokens`."""
    if not status.ready:
        detail = status.detail or "starting"
        return f"{detail[:1].upper()}{detail[1:]}"
    if status.prefilling:
        done = sum(prompt.done for prompt in status.prefilling)
        total = sum(prompt.total for prompt in status.prefilling)
        return f"Computing prompts: {done:,} of {total:,} tokens"
    if status.running:
        answers = "1 answer" if status.running == 1 else f"{status.running} answers"
        queued = f", {status.waiting} queued" if status.waiting else ""
        return f"Generating {answers}{queued}"
    return "Ready"


MESSAGE_SECONDS = 0.5
"""Seconds between two messages. It bounds the error of the times of events. One costs 0.1 ms for each page."""

KEEP_ALIVE_SECONDS = 10.0
"""Seconds. A subscriber without changes gets a comment after this time, so that proxies keep the connection."""

MAX_SUBSCRIBERS = 200
"""Open pages. Bounds the sockets and the memory that pages take."""

QUEUED_MESSAGES = 20
"""Messages. A subscriber that is this far behind (ten seconds) gets a new snapshot instead of them."""

MAX_FRAMES_SENT = 500
"""Frames in one message. Older ones are left out: 2,000 a second is more than a page can draw."""

Json = dict[str, Any]
Subscriber = asyncio.Queue[bytes | None]
"""Messages to one page. None ends the stream."""

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(eq=False)
class LiveFeed:
    """The state that pages show. It looks at `source` from `start` or the first subscriber until `close`."""

    source: StatusSource
    latency: history.LatencyLog
    clock: Callable[[], float] = time.perf_counter
    """The clock of `latency`, in seconds."""
    frames: FrameRecords = field(default_factory=FrameRecords)
    requests: history.RequestLog = field(default_factory=history.RequestLog)

    def __post_init__(self) -> None:
        self.events = history.EventLog()
        self.history = history.History(self.latency)
        self._sent_requests: list[Json] = []  # the open requests that pages have
        self._sent_ended = 0  # ended requests that pages have
        self._sent_frame = 0  # number of the newest frame that pages have
        self._status: Json = {}
        self.subscribers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    # ---- life

    def start(self) -> None:
        """Begin to look at the status. Later calls change nothing."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name="live feed")

    def close(self) -> None:
        """End every stream and stop."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        for queue in self.subscribers:
            _empty(queue)
            queue.put_nowait(None)

    async def _run(self) -> None:
        while True:
            try:
                self.publish_changes()
            except Exception:  # a bug in the status must not end the feed
                log.exception("live feed failed")
            await asyncio.sleep(MESSAGE_SECONDS)

    # ---- messages

    def publish_changes(self) -> None:
        """Look at the status once, and send what changed."""
        status, at = self.source.status(), time.time()
        events = self.events.record_status(status, at)
        sample = self.history.record_status(status, at, self.clock())
        if not self.subscribers:
            self._status, self._sent_frame = {}, self.frames.count
            self._sent_ended = self.requests.ended
            return
        before, self._status = self._status, status_fields(status)
        delta: Json = {}
        changed = {k: v for k, v in self._status.items() if before.get(k, ...) != v}
        if changed:
            delta["status"] = changed
        if events:
            delta["events"] = [asdict(event) for event in events]
        if sample:
            delta["history"] = [sample.compact()]
            delta |= self._request_changes()  # once a second: tokens are counted all the time
        if frames := self._new_frames():
            delta["frames"] = frames
        if delta:
            self._send(_message("delta", delta))

    def _request_changes(self) -> Json:
        """Return the open requests if they changed, and those that ended since the last message."""
        changes: Json = {}
        before, self._sent_requests = self._sent_requests, self._open_requests()
        if before != self._sent_requests:
            changes["open_requests"] = self._sent_requests
        if ended := self.requests.ended_since(self._sent_ended):
            changes["ended_requests"] = [asdict(record) for record in ended]
        self._sent_ended = self.requests.ended
        return changes

    def _open_requests(self) -> list[Json]:
        return [asdict(record) for record in self.requests.open_requests()]

    def _new_frames(self) -> list[list[float | str]]:
        """Return the frames since the last message, as `compact_frame` writes them."""
        if new := self.frames.since(self._sent_frame, MAX_FRAMES_SENT):
            self._sent_frame = new[-1].number
        return _compact_frames(new)

    def _send(self, message: bytes) -> None:
        for queue in self.subscribers:
            if queue.full():
                _empty(queue)
                queue.put_nowait(self._snapshot())
            else:
                queue.put_nowait(message)

    def _snapshot(self) -> bytes:
        if not self._status:
            self._status = status_fields(self.source.status())
        recent = self.frames.since(self._sent_frame - MAX_FRAMES_SENT, 2 * MAX_FRAMES_SENT)
        snapshot = {
            "time": time.time(),
            "status": self._status,
            "events": [asdict(event) for event in self.events.events],
            "history": [sample.compact() for sample in self.history.samples],
            "frames": _compact_frames(f for f in recent if f.number <= self._sent_frame),
            "open_requests": self._open_requests(),
            "ended_requests": [asdict(record) for record in self.requests.recent],
        }
        return _message("snapshot", snapshot)

    # ---- subscribers

    def subscribe(self) -> AsyncGenerator[bytes, None]:
        """Return the server-sent events of one page. Raises CapacityError beyond MAX_SUBSCRIBERS."""
        if self._is_closed or len(self.subscribers) >= MAX_SUBSCRIBERS:
            raise CapacityError(f"{MAX_SUBSCRIBERS} live pages are open. Close one.", retry_after=10)
        self.start()
        return self._stream()

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        queue: Subscriber = asyncio.Queue(QUEUED_MESSAGES)
        self.subscribers.add(queue)
        try:
            yield self._snapshot()
            while True:
                message: bytes | None = b": keep-alive\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        message = await queue.get()
                if message is None:
                    return
                yield message
        finally:
            self.subscribers.discard(queue)


def status_fields(status: ClusterStatus) -> Json:
    """Return the fields of `status` for a page, with the line about its activity."""
    fields = asdict(status)
    for name in ("uptime_seconds", "phase_seconds"):
        del fields[name]  # they would change in every message
    fields["started_at"] = round(time.time() - status.uptime_seconds)
    fields["tokens_per_second"] = round(status.tokens_per_second, 2)
    fields["activity"] = describe_activity(status)
    return fields


def _compact_frames(frames: Iterable[FrameRecord]) -> list[list[float | str]]:
    offset = time.time() - time.monotonic()
    return [compact_frame(frame, offset) for frame in frames if frame.stages]


def compact_frame(frame: FrameRecord, offset: float) -> list[float | str]:
    """Return a frame as `[number, kind, rows, wasted, sent, flight, start, length, …]`.

    `sent` is seconds since 1970, `offset` what the loop's clock lacks. The other times are milliseconds: the time in
    flight, then for each stage the start after `sent` and the length. `kind` is one letter.
    """
    fields: list[float | str] = [frame.number, frame.kind[0], frame.rows, frame.wasted]
    sent, flight = frame.sent_at + offset, (frame.returned_at - frame.sent_at) * 1000
    fields += [round(sent, 4), round(flight, 2)]
    for start, end in frame.stages:
        fields += [round((start - frame.sent_at) * 1000, 2), round((end - start) * 1000, 2)]
    return fields


def _message(event: str, data: Json) -> bytes:
    return f"event: {event}\ndata: {_dumps(data)}\n\n".encode()


def _empty(queue: Subscriber) -> None:
    while not queue.empty():
        queue.get_nowait()


ASSETS = Path(__file__).parent / "assets"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The content security policy. With `trusted-types 'none'` no script can turn text into HTML."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
"""Headers of every file. `no-cache` makes a browser ask again after an update; an unchanged file costs a 304."""


class PageFiles(StaticFiles):
    """The files of the page, with HEADERS."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


_files = PageFiles(directory=ASSETS)


async def send_page(request: Request) -> Response:
    """Answer `GET /`."""
    return await _files.get_response("index.html", request.scope)


page_routes = [Route("/", send_page), Mount("/assets", _files)]
"""The routes of the files. They need no API key, because a browser cannot send one when it opens a page."""

router = APIRouter()


def feed_of(request: Request) -> LiveFeed:
    """Return the feed of the app that received `request`."""
    return cast(LiveFeed, request.app.state.live_feed)


@router.get("/v1/events")
async def stream_events(request: Request) -> Response:
    """Stream one `snapshot` event, then `delta` events with what changed."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed_of(request).subscribe(), media_type="text/event-stream", headers=headers)
