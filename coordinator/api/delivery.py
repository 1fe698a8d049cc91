"""From the request to the last byte of its answer: generate, send whole or as a stream, stop when the client leaves."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.api.context import Api, api_of
from coordinator.api.errors import error_body
from coordinator.api.http_answer import Answer
from coordinator.api.merge import Merge
from coordinator.generation.request import GenerationEvent, PrefillProgress
from coordinator.status.metrics import RequestMeter
from coordinator.text.model_info import Json
from proto.errors import ClusterError, RequestError

log = logging.getLogger(__name__)

DISCONNECT_POLL_SECONDS = 0.5
"""How often a handler that sends nothing looks whether its client is still there."""

CLIENT_LEFT = 499
"""nginx's status for a client that left; nobody receives it."""

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Item = tuple[int, GenerationEvent] | None
Prepare = Callable[[Api, Request], Awaitable[Answer]]


async def serve(request: Request, endpoint: str, prepare: Prepare) -> Response:
    """Answer one request: `prepare` reads it, the engine generates, the client gets a body or a stream."""
    api = api_of(request)
    meter = api.metrics.begin(endpoint)
    try:
        answer = await prepare(api, request)
        delivery = Delivery(api, answer, meter)
    except BaseException as error:
        meter.end(_outcome(error))
        raise
    if answer.stream:
        return await delivery.stream()
    return await delivery.whole(request)


class Delivery:
    """One answer on its way. `close` is called once it is over, however it ends."""

    def __init__(self, api: Api, answer: Answer, meter: RequestMeter) -> None:
        self._answer = answer
        self._meter = meter
        self._keep_alive = api.options.keep_alive_seconds
        self._merge = Merge(api.generator, [choice.request for choice in answer.choices])
        self._outcome = "cancelled"

    async def whole(self, request: Request) -> Response:
        """Wait for all of it, as long as the client does."""
        with closing(self):
            try:
                while not self._answer.done:
                    item = await self._next(DISCONNECT_POLL_SECONDS)
                    self._accept(item)
                    if await request.is_disconnected():
                        return Response(status_code=CLIENT_LEFT)
                self._succeed()
                return JSONResponse(self._answer.whole(), headers={"X-Request-Id": self._answer.id})
            except Exception as error:
                self._outcome = _outcome(error)
                raise

    async def stream(self) -> Response:
        """Send it as it comes. An error before anything came gets its own status, a later one an event."""
        try:
            # A refusal comes at once; a long queue must not leave the client without a sign for longer.
            first = await self._next(self._keep_alive)
        except BaseException as error:
            self._outcome = _outcome(error)
            self.close()
            raise
        return EventStream(self._events(first), self._answer.id, self.close)

    async def _events(self, item: Item) -> AsyncGenerator[bytes, None]:
        yield _data(self._answer.opening())
        try:
            while True:
                if content := _comment(item) + _data(self._accept(item)):
                    yield content
                if self._answer.done:
                    break
                item = await self._next(self._keep_alive)
            self._succeed()
            yield _data(self._answer.closing()) + DONE
        except ClusterError as error:
            self._outcome = _outcome(error)
            yield _data([error_body(error)])
        except Exception as error:
            log.exception("stream failed", extra={"request_id": self._answer.id})
            self._outcome = _outcome(error)
            yield _data([error_body(error)])

    async def _next(self, seconds: float) -> Item:
        """As `Merge.next`; a field that the engine refuses is named as the client wrote it."""
        try:
            return await self._merge.next(seconds)
        except RequestError as error:
            error.param = self._answer.names.get(error.param or "", error.param)
            raise

    def _accept(self, item: Item) -> list[Json]:
        if item is None:
            return []
        index, event = item
        choice = self._answer.choices[index]
        if choice.done:
            return []  # on its way when a stop string ended the choice
        before = choice.tokens
        chunks = self._answer.accept(index, event)
        if choice.tokens > before:
            self._meter.record_tokens(index, choice.tokens - before)
        if choice.done:
            self._merge.cancel(index)  # the engine knows nothing of stop strings
        return chunks

    def _succeed(self) -> None:
        self._outcome = self._answer.choices[0].finish_reason or "stop"
        self._meter.record_prompt(self._answer.prompt_tokens, self._answer.cached_tokens)

    def close(self) -> None:
        """Stop what still runs; count and log the request."""
        self._merge.close()
        self._meter.end(self._outcome)
        log.info(
            "request ended",
            extra={
                "request_id": self._answer.id,
                "outcome": self._outcome,
                "prompt_tokens": self._answer.prompt_tokens,
                "completion_tokens": sum(choice.tokens for choice in self._answer.choices),
                "seconds": round(self._meter.seconds, 3),
                **({} if self._answer.user is None else {"user": self._answer.user}),
            },
        )


class EventStream(StreamingResponse):
    """Server-sent events. `on_close` runs when the last is sent or the client has left, even before the first."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], request_id: str, on_close: Callable[[], None]
    ) -> None:
        headers = {
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # asks nginx not to collect a stream before it passes it on
            "X-Request-Id": request_id,
        }
        super().__init__(events, headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def _data(chunks: list[Json]) -> bytes:
    dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    return b"".join(b"data: " + dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def _comment(item: Item) -> bytes:
    """What shows that all is well while there are no tokens. Clients skip comments, logs and people see them."""
    match item:
        case None:
            return KEEP_ALIVE
        case (_, PrefillProgress(done=done, total=total)):
            return f": prefill {done}/{total}\n\n".encode()
        case _:
            return b""


def _outcome(error: BaseException) -> str:
    """How a failed request is counted."""
    if isinstance(error, ClusterError):
        return "refused" if error.http_status < 500 else "error"
    if isinstance(error, HTTPException):
        return "refused"
    return "error" if isinstance(error, Exception) else "cancelled"
