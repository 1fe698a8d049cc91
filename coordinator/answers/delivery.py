"""Delivery of an answer: run the engine, send it whole or streamed, cancel when the client disconnects."""

from __future__ import annotations

import abc
import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.answers.choice import AnswerEvent, GeneratedAnswer
from coordinator.answers.journal import Record
from coordinator.schedule.request import GenerationEvent, GenerationRequest, Generator, PrefillProgress
from coordinator.status.metrics import RequestMeter
from coordinator.text.schemas import Json
from coordinator.web.context import Api
from coordinator.web.error_responses import status_of
from proto.errors import ClusterError, RequestError

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def sse_data(data: Json) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + _dumps(data).encode() + b"\n\n"


def sse_event(name: str, data: Json) -> bytes:
    """Return one server-sent event named `name`."""
    return b"event: " + name.encode() + b"\n" + sse_data(data)


def json_line(data: Json) -> bytes:
    """Return `data` as one line of JSON."""
    return _dumps(data).encode() + b"\n"


class AnswerWriter(abc.ABC):
    """The format of one answer, whole or streamed as server-sent events. Bytes of one call are sent in one write."""

    media_type = EVENT_STREAM

    def __init__(self, answer: GeneratedAnswer) -> None:
        self._answer = answer

    @abc.abstractmethod
    def whole(self) -> Json:
        """Return the body of a complete answer that is not streamed."""

    @abc.abstractmethod
    def write_event(self, event: AnswerEvent) -> bytes:
        """Return the bytes of one event."""

    @abc.abstractmethod
    def closing(self) -> bytes:
        """Return the end of a stream, after every choice has ended."""

    @abc.abstractmethod
    def error(self, error: Exception) -> bytes:
        """Return the end of a stream that failed."""

    def opening(self) -> bytes:
        """Return the start of a stream."""
        return b""

    def write(self, events: Sequence[AnswerEvent]) -> bytes:
        """Return the bytes of `events`."""
        return b"".join(self.write_event(event) for event in events)

    def comment(self, text: str) -> bytes:
        """Return `text` in a form that clients ignore. A format without comments has none."""
        return f": {text}\n\n".encode()

    def keep_alive(self, *, queued: bool) -> bytes:
        """Return a sign of life that clients count, which comments are not. OpenAI's chat has comments only."""
        return b""


AnswerStatus = Literal["queued", "in_progress", "ended", "failed", "cancelled"]


class StoredWriter(AnswerWriter):
    """The format of an answer that goes on without its client, which retrieves it later."""

    @abc.abstractmethod
    def result(self, status: AnswerStatus) -> Json:
        """Return the object that clients retrieve."""

    @abc.abstractmethod
    def cancelled(self) -> bytes:
        """Return the end of a stream that a client cancelled."""

    @abc.abstractmethod
    def interrupted(self, error: Exception) -> bytes:
        """Return the end of a connection whose stream goes on later. It changes no state."""


BACKLOG, BACKLOG_OF_REQUEST = 1024, 256
"""Events that may wait for a client, and more for each request, 2 KB each. STALL_SECONDS end the connection later."""


class SubmittedRequests:
    """The requests of an answer, started by the constructor, and a queue of their events. `close` never waits."""

    def __init__(self, generator: Generator, requests: Sequence[GenerationRequest]) -> None:
        self._generator = generator
        self._queue: asyncio.Queue[tuple[int, GenerationEvent | Exception]] = asyncio.Queue()
        self._requests = requests
        self._backlog = BACKLOG + BACKLOG_OF_REQUEST * len(requests)
        self._running: dict[int, Callable[[], None]] = {}
        for index, request in enumerate(requests):
            try:
                self._running[index] = generator.submit(request, partial(self._deliver, index))
            except Exception as error:  # a refusal or a bug, which `next_event` raises
                self._queue.put_nowait((index, error))

    @property
    def position(self) -> int | None:
        """The position in the queue of the request that is next, or None if none waits."""
        found = map(self._generator.queue_position, self._requests)
        return min((place for place in found if place is not None), default=None)

    async def next_event(self, seconds: float) -> tuple[int, GenerationEvent] | None:
        """Return the next event and its request's index, or None after `seconds`. Raises an error in its place."""
        try:
            async with asyncio.timeout(seconds):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        return index, event

    def cancel_request(self, index: int) -> None:
        """Stop one request. Events already in the queue still arrive."""
        if (cancel := self._running.pop(index, None)) is not None:
            cancel()

    def close(self) -> None:
        """Stop all requests that still run."""
        for index in list(self._running):
            self.cancel_request(index)

    def fail(self, error: ClusterError) -> None:
        """Stop all requests. `next_event` raises `error` after the events that are in the queue."""
        self.close()
        self._queue.put_nowait((0, error))

    def _deliver(self, index: int, event: GenerationEvent) -> None:
        """Queue an event, or an error in its place if the client leaves too many unread."""
        if self._queue.qsize() < self._backlog:
            self._queue.put_nowait((index, event))
        elif index in self._running:
            error = ClusterError("the client did not read its answer. Read it faster.")
            self._queue.put_nowait((index, error))
            self.cancel_request(index)


QUEUE_SECONDS = 2.0
"""Seconds. A stream whose request still waits after this time begins with its position in the queue."""

DISCONNECT_POLL_SECONDS = 0.5
"""Seconds. How often a handler that sends nothing checks whether its client is still connected."""


class StoppedError(ClusterError, http=410):
    """A request that a person stopped. Clients repeat no request with this status."""

    def __init__(self) -> None:
        super().__init__("The request was stopped on the page of the server. Send it again if that was a mistake.")


CLIENT_DISCONNECTED = 499
"""nginx's HTTP status for a client that disconnected. No client receives it."""

IndexedEvent = tuple[int, GenerationEvent] | None
"""An event of the engine with the index of its choice, or None if none came in time."""


@dataclass(frozen=True)
class PreparedAnswer:
    """An answer before its first token, and the writer of its dialect. A stored answer has a `record`."""

    answer: GeneratedAnswer
    writer: AnswerWriter
    stream: bool
    record: Record | None = None


class Delivery:
    """The delivery of one answer. It calls `close` at its end, also after an error.

    `outcome` is the finish reason, `refused` or `error`, and `cancelled` until then. With `opened` the client has the
    opening of the stream already. A stream that is `logged` has no signs of life, which its readers get from the log.
    """

    def __init__(
        self, api: Api, prepared: PreparedAnswer, meter: RequestMeter, *, opened: bool = False, logged: bool = False
    ) -> None:
        self._answer = prepared.answer
        self._writer = prepared.writer
        self.meter = meter
        self._keep_alive = api.options.keep_alive_seconds
        meter.record.prompt_tokens = prepared.answer.prompt_tokens
        open_choices = () if prepared.answer.done else prepared.answer.choices
        self._queue = SubmittedRequests(api.generator, [each.request for each in open_choices])
        meter.allow_stop(prepared.answer.id, self.stop)
        self.outcome = "cancelled"
        self._opened = opened
        self._logged = logged
        self._sent_at = time.monotonic()
        """The time when the client last got more than a comment."""

    async def send_whole(self, request: Request) -> Response:
        """Return the complete answer, unless the client disconnects before."""
        with closing(self):
            try:
                while not self._answer.done:
                    self._apply(await self._next_event(DISCONNECT_POLL_SECONDS))
                    if await request.is_disconnected():
                        return Response(status_code=CLIENT_DISCONNECTED)
                self._record_success()
                return JSONResponse(self._writer.whole(), headers={"X-Request-Id": self._answer.id})
            except Exception as error:
                self.outcome = outcome_of(error)
                raise

    @property
    def queued(self) -> bool:
        """True while a request waits in the queue."""
        return self._queue.position is not None

    async def stream(self) -> Response:
        """Return the answer as a stream. An error before the first event has its own status, a later one an event."""
        seconds = min(QUEUE_SECONDS, self._keep_alive)
        first = await self.first_event(seconds)
        if first is None and not self.queued:
            first = await self.first_event(self._keep_alive - seconds)
        chunks, kind = self.chunks(first), self._writer.media_type
        return AnswerStream(chunks, self._answer.id, self.close, kind)

    async def first_event(self, seconds: float) -> IndexedEvent:
        """Return the first event, or None after `seconds`. The engine rejects a request at once, which raises."""
        try:
            return await self._next_event(seconds)
        except BaseException as error:
            self.outcome = outcome_of(error)
            self.close()
            raise

    async def chunks(self, item: IndexedEvent) -> AsyncGenerator[bytes, None]:
        """Yield the stream from its first event on. An error is its last event."""
        try:
            while True:
                events = self._apply(item)  # before the opening, which knows the cached tokens
                opening, comment, written = self._opening(), self._progress(item), self._writer.write(events)
                now = time.monotonic()
                if opening or written:
                    self._sent_at = now
                elif now >= self._sent_at + self._keep_alive:
                    self._sent_at = now
                    comment += b"" if self._logged else self._writer.keep_alive(queued=self.queued)
                    comment = comment or self._writer.comment("keep-alive")
                if content := opening + comment + written:
                    yield content
                if self._answer.done:
                    break
                item = await self._next_event(self._sent_at + self._keep_alive - now)
            self._record_success()
            yield self._writer.closing()
        except Exception as error:
            if not isinstance(error, ClusterError):
                log.exception("stream failed", extra={"request_id": self._answer.id})
            self.outcome = outcome_of(error)
            yield self._opening() + self._writer.error(error)

    def _opening(self) -> bytes:
        """Return the stream's opening, the first time."""
        opened, self._opened = self._opened, True
        return b"" if opened else self._writer.opening()

    def _progress(self, item: IndexedEvent) -> bytes:
        """Return a comment about the progress of a request that has no token yet."""
        match item:
            case None if self.queued:
                return self._writer.comment(f"queued {self._queue.position}")
            case (_, PrefillProgress(done=done, total=total)):
                return self._writer.comment(f"prefill {done}/{total}")
            case _:
                return b""

    async def _next_event(self, seconds: float) -> IndexedEvent:
        """Return `SubmittedRequests.next_event`. A field that the engine rejects gets the client's name."""
        try:
            return await self._queue.next_event(seconds)
        except RequestError as error:
            if error.param is not None:
                error.param = self._answer.settings.client_name(error.param)
            raise

    def _apply(self, item: IndexedEvent) -> list[AnswerEvent]:
        if item is None:
            return []
        index, event = item
        choice = self._answer.choices[index]
        if choice.done:
            return []  # the event was in the queue when a stop string ended the choice
        before = choice.tokens
        events = choice.apply_event(event)
        if isinstance(event, PrefillProgress):
            self.meter.record.prompt_done = self._answer.prompt_done
        if choice.tokens > before:
            self.meter.record_tokens(index, choice.tokens - before)
        if choice.done:
            self._queue.cancel_request(index)  # the engine does not look for stop strings
        return events

    def _record_success(self) -> None:
        self.outcome = self._answer.choices[0].finish_reason or "stop"
        self.meter.record_prompt(self._answer.prompt_tokens, self._answer.cached_tokens)

    def stop(self) -> None:
        """End the answer with StoppedError, and free the places of its requests at once."""
        self._queue.fail(StoppedError())

    def close(self) -> None:
        """Stop the requests that still run; record and log the end."""
        self._queue.close()
        seconds = self.meter.end(self.outcome)
        log.info(
            "request ended",
            extra={
                "request_id": self._answer.id,
                "outcome": self.outcome,
                "prompt_tokens": self._answer.prompt_tokens,
                "completion_tokens": self._answer.completion_tokens,
                "seconds": round(seconds, 3),
            },
        )


class AnswerStream(StreamingResponse):
    """A streamed response. `on_close` runs after the last chunk or after the client disconnected."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        request_id: str,
        on_close: Callable[[], None],
        media_type: str,
    ) -> None:
        headers = {
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # makes nginx forward the stream without buffering
            "X-Request-Id": request_id,
        }
        super().__init__(chunks, headers=headers, media_type=media_type)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a failed request for the metrics."""
    if not isinstance(error, Exception) or isinstance(error, StoppedError):
        return "cancelled"
    return "refused" if status_of(error) < 500 else "error"
