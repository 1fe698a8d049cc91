"""Delivery of an answer: run the engine, send the answer whole or streamed, cancel when the client disconnects."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.api.answer.events import AnswerEvent
from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.api.answer.merge import Merge
from coordinator.api.answer.writer import AnswerWriter
from coordinator.api.request.client import client_of
from coordinator.api.request.context import Api, api_of
from coordinator.generation.request import GenerationEvent, GenerationRequest, PrefillProgress
from coordinator.journal.record import Record
from coordinator.status.metrics import RequestMeter
from proto.errors import ClusterError, RequestError

log = logging.getLogger(__name__)

DISCONNECT_POLL_SECONDS = 0.5
"""Seconds. How often a handler that sends nothing checks whether its client is still connected."""

CLIENT_DISCONNECTED = 499
"""nginx's HTTP status for a client that disconnected. No client receives it."""

IndexedEvent = tuple[int, GenerationEvent] | None
"""An event of the engine with the index of its choice, or None if none came in time."""


@dataclass(frozen=True)
class PreparedAnswer:
    """An answer before its first token, with the writer of its dialect.

    `record` is set for an answer that is stored.
    """

    answer: GeneratedAnswer
    writer: AnswerWriter
    stream: bool
    record: Record | None = None


Prepare = Callable[[Api, Request], Awaitable[PreparedAnswer]]
"""A function that reads a request in one dialect. It raises RequestError, naming the client's field."""


async def serve_answer(request: Request, endpoint: str, prepare: Prepare) -> Response:
    """Answer one request: `prepare` reads it, the engine generates, the client gets a body or a stream."""
    prepared, meter = await read_answer(request, endpoint, prepare)
    delivery = Delivery(api_of(request), prepared, meter)
    if prepared.stream:
        return await delivery.stream()
    return await delivery.send_whole(request)


async def read_answer(
    request: Request, endpoint: str, prepare: Prepare
) -> tuple[PreparedAnswer, RequestMeter]:
    """Read a request with `prepare`, assign it to its client, and begin to measure it."""
    api, client = api_of(request), client_of(request)
    meter = api.metrics.begin(endpoint)
    try:
        prepared = await prepare(api, request)
        for choice in prepared.answer.choices:
            choice.assign_client(client)
        return prepared, meter
    except BaseException as error:
        meter.end(_outcome(error))
        raise


class Delivery:
    """The delivery of one answer. It calls `close` at its end, also after an error.

    `outcome` is the finish reason, `refused` or `error`, and `cancelled` until then. With `opened` the client has the
    opening of the stream already.
    """

    def __init__(
        self, api: Api, prepared: PreparedAnswer, meter: RequestMeter, *, opened: bool = False
    ) -> None:
        self._answer = prepared.answer
        self._writer = prepared.writer
        self._meter = meter
        self._keep_alive = api.options.keep_alive_seconds
        self._merge = Merge(api.generator, self._next_requests())
        self.outcome = "cancelled"
        self._opened = opened

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
                self.outcome = _outcome(error)
                raise

    async def stream(self) -> Response:
        """Return the answer as a stream. An error before the first event has its own status, a later one an event."""
        # A request in a long queue starts its stream after this wait.
        first = await self.first_event(self._keep_alive)
        return AnswerStream(
            self.chunks(first), self._answer.id, self.close, self._writer.media_type
        )

    async def first_event(self, seconds: float) -> IndexedEvent:
        """Return the first event, or None after `seconds`. The engine rejects a request at once, which raises."""
        try:
            return await self._next_event(seconds)
        except BaseException as error:
            self.outcome = _outcome(error)
            self.close()
            raise

    async def chunks(self, item: IndexedEvent) -> AsyncGenerator[bytes, None]:
        """Yield the stream from its first event on. An error is its last event."""
        try:
            while True:
                content = self._sign_of_life(item) + self._writer.write(self._apply(item))
                if content := self._after_opening(content):
                    yield content
                if self._answer.done:
                    break
                item = await self._next_event(self._keep_alive)
            self._record_success()
            yield self._writer.closing()
        except ClusterError as error:
            self.outcome = _outcome(error)
            yield self._after_opening(self._writer.error(error))
        except Exception as error:
            log.exception("stream failed", extra={"request_id": self._answer.id})
            self.outcome = _outcome(error)
            yield self._after_opening(self._writer.error(error))

    def _next_requests(self) -> list[GenerationRequest]:
        if self._answer.done:
            return []
        return [choice.next_request for choice in self._answer.choices]

    def _after_opening(self, content: bytes) -> bytes:
        """Return `content`, preceded by the stream's opening the first time. The opening knows the cached tokens."""
        if self._opened:
            return content
        self._opened = True
        return self._writer.opening() + content

    def _sign_of_life(self, item: IndexedEvent) -> bytes:
        match item:
            case None:
                return self._writer.keep_alive()
            case (_, PrefillProgress(done=done, total=total)):
                return self._writer.progress(done, total)
            case _:
                return b""

    async def _next_event(self, seconds: float) -> IndexedEvent:
        """Return `Merge.next_event`. A field that the engine rejects gets the client's name."""
        try:
            return await self._merge.next_event(seconds)
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
        if choice.tokens > before:
            self._meter.record_tokens(index, choice.tokens - before)
        if choice.done:
            self._merge.cancel_request(index)  # the engine does not look for stop strings
        elif (request := choice.take_continuation()) is not None:
            self._merge.replace_request(index, request)
        return events

    def _record_success(self) -> None:
        self.outcome = self._answer.choices[0].finish_reason or "stop"
        self._meter.record_prompt(self._answer.prompt_tokens, self._answer.cached_tokens)

    def close(self) -> None:
        """Stop the requests that still run; record and log the end."""
        self._merge.close()
        self._meter.end(self.outcome)
        log.info(
            "request ended",
            extra={
                "request_id": self._answer.id,
                "outcome": self.outcome,
                "prompt_tokens": self._answer.prompt_tokens,
                "completion_tokens": self._answer.completion_tokens,
                "seconds": round(self._meter.seconds, 3),
                **({} if self._answer.user is None else {"user": self._answer.user}),
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


def _outcome(error: BaseException) -> str:
    """Return the outcome of a failed request for the metrics."""
    if isinstance(error, ClusterError):
        return "refused" if error.http_status < 500 else "error"
    if isinstance(error, HTTPException):
        return "refused"
    return "error" if isinstance(error, Exception) else "cancelled"
