"""Stored responses: they go on without their client, and their tokens reach the journal. Each belongs to one key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.answers.delivery import (
    EVENT_STREAM,
    AnswerStatus,
    AnswerStream,
    Delivery,
    IndexedEvent,
    PreparedAnswer,
    StoredWriter,
    outcome_of,
)
from coordinator.answers.journal import Journal, Record
from coordinator.schedule.request import GenerationRequest
from coordinator.status.metrics import RequestMeter
from coordinator.text.schemas import Json
from coordinator.web.context import Api, api_of, client_of, describe_client
from proto.errors import CapacityError, ClusterError, NotReadyError, RequestError, StaleEpochError
from proto.params import SamplingParams

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 10.0
"""Seconds. An answer that is not in the background is cancelled when all its clients are gone for this long."""

REFUSAL_SECONDS = 0.1
"""Seconds. Wait for the engine to reject a request in the background. It rejects in its first step."""

RETRY_SECONDS = 1.0
"""Seconds before a restored answer tries again to enter the queue."""


class StreamLog:
    """The events of a stream, numbered from 0. `events` are those of a stream that has ended."""

    def __init__(self, events: Sequence[bytes] = ()) -> None:
        self.events: list[bytes] = list(events)
        self._ended = bool(events)
        self._last = b""
        self._changed = asyncio.Event()

    def append(self, content: bytes) -> None:
        """Append the events in `content`. Comments have no number and are left out."""
        if new := [b + b"\n\n" for b in content.split(b"\n\n") if b and not b.startswith(b":")]:
            self.events += new
            self._wake_followers()  # only then: it begins a new wait for a sign of life

    def end(self, last: bytes = b"") -> None:
        """End the stream. `last` is sent to the present clients and has no number."""
        self._ended, self._last = True, last
        self._wake_followers()

    async def follow(self, after: int, keep_alive: Callable[[], bytes], seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `after` until the end, and `keep_alive()` after `seconds` of silence."""
        position = after + 1
        while True:
            changed = self._changed
            if position < len(self.events):
                content = b"".join(self.events[position:])
                position = len(self.events)
                yield content
            elif self._ended:
                if self._last:
                    yield self._last
                return
            else:
                try:
                    await asyncio.wait_for(changed.wait(), seconds)
                except TimeoutError:
                    if position >= len(self.events):  # its number is that of the newest event
                        yield keep_alive()

    def _wake_followers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def pin_request(request: GenerationRequest) -> Json:
    """Return `request` in the types of msgpack."""
    return {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "params": request.params.to_wire(),
        "stop_tokens": tuple(request.stop_tokens),
        "request_id": request.request_id,
        "turn": request.turn,
        "continued": request.continued,
    }


def pinned_request(content: dict[str, Any]) -> GenerationRequest:
    """Invert `pin_request`. Raises ProtocolError for invalid parameters."""
    prompt, params = tuple(content["prompt"]), SamplingParams.from_wire(content["params"])
    typed = {"prompt": prompt, "params": params, "stop_tokens": frozenset(content["stop_tokens"])}
    return GenerationRequest(**{**content, **typed})


class StoredAnswer:
    """A stored answer in progress. `on_end` is called after its end; `log` has its events."""

    def __init__(self, api: Api, prepared: PreparedAnswer, journal: Journal, on_end: Callable[[], object]) -> None:
        assert prepared.record is not None
        assert len(prepared.answer.choices) == 1, "the order of events must follow from the tokens"
        self.record = prepared.record
        self.writer = writer_of(prepared)
        self.log = StreamLog()
        self._api = api
        self._prepared = prepared
        self._choice = prepared.answer.choices[0]
        self._journal = journal
        self._on_end = on_end
        self._status: AnswerStatus = "queued"
        self._written = 0  # tokens in the journal
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._delivery: Delivery | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._cancellation: asyncio.Task[None] | None = None

    # ---- life

    async def start(self, meter: RequestMeter) -> None:
        """Begin to generate. Raises the engine's refusal."""
        delivery = Delivery(self._api, self._prepared, meter, logged=True)
        wait = REFUSAL_SECONDS if self.record.background else self._api.options.keep_alive_seconds
        first = await delivery.first_event(wait)
        try:
            # Committed before the client learns the id.
            await asyncio.wrap_future(self._journal.save_answer(self.record))
        except BaseException:
            delivery.close()
            raise
        self._task = asyncio.create_task(self._run(delivery, first), name=self.record.id)

    def restore(self) -> None:
        """Continue after the tokens of the record, as soon as the engine has room."""
        events = self._choice.replay(self.record.tokens)
        self._written = len(self.record.tokens)
        self.log.append(self.writer.opening() + self.writer.write(events))
        self._task = asyncio.create_task(self._run_restored(), name=self.record.id)

    async def cancel(self) -> None:
        """Cancel the answer and wait for its end."""
        await self._stop("cancelled")

    async def suspend(self, error: ClusterError) -> None:
        """Stop without an end, so that the next start continues. Present clients receive `error`."""
        await self._stop("in_progress")
        self.log.end(self.writer.interrupted(error))

    async def fail(self, error: ClusterError) -> None:
        """End the answer with `error`."""
        if self._task is not None and not self._task.done():
            await self._stop("failed", self.writer.error(error))

    # ---- clients

    def result(self) -> Json:
        """Return the object that clients retrieve now."""
        return self.writer.result(self._status)

    def stream(self, after: int = -1) -> Response:
        """Return the stream of the events after number `after`."""
        self._clients += 1
        if self._expiry is not None:
            self._expiry.cancel()
        seconds = self._api.options.keep_alive_seconds
        events = self.log.follow(after, self._keep_alive, seconds)
        return AnswerStream(events, self.record.id, self._lose_client, EVENT_STREAM)

    def _keep_alive(self) -> bytes:
        return self.writer.keep_alive(queued=self._delivery is None or self._delivery.queued)

    def _lose_client(self) -> None:
        self._clients -= 1
        if self._clients or self.record.background or self._task is None or self._task.done():
            return
        self._expiry = asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._expire)

    def _expire(self) -> None:
        if self._task is not None and not self._task.done():
            log.info("request cancelled: no client reconnected", extra={"id": self.record.id})
            self._begin_cancellation()

    def _begin_cancellation(self) -> None:
        self._cancellation = asyncio.create_task(self.cancel())

    # ---- the task

    async def _run_restored(self) -> None:
        seconds = self._api.options.keep_alive_seconds
        while True:
            if not self._api.status.status().ready:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            meter = RequestMeter(self._api.metrics, "responses")
            delivery = Delivery(self._api, self._prepared, meter, opened=True, logged=True)
            try:
                first = None if self._prepared.answer.done else await delivery.first_event(seconds)
            except (CapacityError, NotReadyError) as error:
                await asyncio.sleep(getattr(error, "retry_after", RETRY_SECONDS))
            except ClusterError as error:
                self._end("failed", self.writer.error(error))
                return
            else:
                log.info("answer restored", extra={"id": self.record.id, "tokens": self._written})
                await self._run(delivery, first)
                return

    async def _run(self, delivery: Delivery, first: IndexedEvent) -> None:
        self._status, self._delivery = "in_progress", delivery
        delivery.meter.allow_stop(self.record.id, self._begin_cancellation)
        try:
            async for content in delivery.chunks(first):
                self.log.append(content)
                self._write_tokens()
        finally:
            delivery.close()
        self._end("failed" if delivery.outcome in ("error", "refused", "cancelled") else "ended")

    def _write_tokens(self) -> None:
        new = tuple(self._choice.generated[self._written :])
        if new:
            self._journal.append_tokens(self.record.id, self._written, new)
            self._written += len(new)

    async def _stop(self, status: AnswerStatus, last: bytes = b"") -> None:
        if self._task is None or self._task.done():
            return
        self._status = status
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.record.ended:  # by its last token, or by another caller
            return
        if status == "in_progress":
            self._write_tokens()
        else:
            self._end(status, last or self.writer.cancelled())

    def _end(self, status: AnswerStatus, last: bytes = b"") -> None:
        self._status = status
        if last:
            self.log.append(last)
        result, events = self.writer.result(status), self.log.events
        self.record = replace(self.record, ended=True, result=result, events=events)
        self._journal.save_answer(self.record)
        self.log.end()
        self._on_end()


def writer_of(prepared: PreparedAnswer) -> StoredWriter:
    """Return the writer of a stored answer."""
    return cast(StoredWriter, prepared.writer)


Restore = Callable[[Api, Record, GenerationRequest], Awaitable[PreparedAnswer]]
"""A function that reads the body of a record again and continues the engine's request."""


class UnknownAnswerError(RequestError, http=404):
    """The request names an answer that is not stored, or that belongs to another key."""


class StoredAnswers:
    """The stored answers of one app."""

    def __init__(self, api: Api, journal: Journal, restore: Restore) -> None:
        self.journal = journal
        self._api = api
        self._restore = restore
        self._resuming = asyncio.Lock()
        self._running: dict[str, StoredAnswer] = {}

    # ---- life

    async def resume(self) -> None:
        """Continue the answers that an earlier process did not end. The engine must serve."""
        for record in await self.journal.unfinished():
            await self._resume_answer(record.id)

    async def suspend(self) -> None:
        """Stop all answers without an end; the next start continues them."""
        error = NotReadyError("the server is ending. Reconnect when it is back.")
        await asyncio.gather(*(answer.suspend(error) for answer in list(self._running.values())))

    async def fail_all(self, error: ClusterError) -> None:
        """End all answers with `error`."""
        await asyncio.gather(*(answer.fail(error) for answer in list(self._running.values())))

    async def _resume_answer(self, answer_id: str) -> None:
        """Continue an answer of an earlier process, unless that is done, or it was ended or deleted meanwhile."""
        async with self._resuming:
            record = await self.journal.find(answer_id)
            if record is not None and not record.ended and answer_id not in self._running:
                await self._resume_record(record)

    async def _resume_record(self, record: Record) -> None:
        try:
            if record.model != self._api.model.fingerprint:
                raise StaleEpochError("the server serves another model since its restart")
            prepared = await self._restore(self._api, record, pinned_request(record.request))
            self._add(prepared).restore()
            return
        except Exception as error:
            known = error.public if isinstance(error, ClusterError) else ""
            details = {"id": record.id, "error": str(error)}
            log.warning("stored answer ended", extra=details, exc_info=not known)
            message = known or "the stored request cannot be read by this release"
        failure = {"code": "server_error", "message": message}
        result = {**record.result, "status": "failed", "error": failure}
        self.journal.save_answer(replace(record, ended=True, result=result))

    def _add(self, prepared: PreparedAnswer) -> StoredAnswer:
        assert prepared.record is not None
        answer_id = prepared.record.id
        forget = partial(self._running.pop, answer_id, None)
        answer = StoredAnswer(self._api, prepared, self.journal, forget)
        self._running[answer_id] = answer
        return answer

    # ---- answers

    async def start(self, prepared: PreparedAnswer, meter: RequestMeter) -> StoredAnswer:
        """Start an answer that goes on without its client. Raises the engine's refusal."""
        assert prepared.record is not None
        record = replace(prepared.record, result=writer_of(prepared).result("queued"))
        answer = self._add(replace(prepared, record=record))
        try:
            await answer.start(meter)
        except BaseException:
            del self._running[record.id]
            raise
        return answer

    def keep(self, prepared: PreparedAnswer) -> None:
        """Store an answer that is complete and was not streamed."""
        assert prepared.record is not None
        result = writer_of(prepared).result("ended")
        self.journal.save_answer(replace(prepared.record, ended=True, request={}, result=result))

    async def find(
        self, request: Request, answer_id: str, param: str | None = None
    ) -> tuple[Record, StoredAnswer | None]:
        """Return a record of the request's key, and the answer in progress. Raises UnknownAnswerError for `param`."""
        running = self._running.get(answer_id)
        record = running.record if running else await self.journal.find(answer_id)
        if record is None or record.owner != owner_of(request):
            raise UnknownAnswerError(f"{answer_id!r:.80}: not found. It was not stored, or is too old.", param=param)
        if running := self._running.get(answer_id):
            record = replace(record, result=running.result())
        return record, running

    async def find_ended(self, request: Request, answer_id: str, param: str) -> Record:
        """Return a record that goes into a prompt. Raises NotReadyError for one that has not ended."""
        record, running = await self.find(request, answer_id, param)
        if running is not None or not record.ended:
            raise NotReadyError(f"{param}: {answer_id!r:.80} is in progress. Try again after its end.")
        return record

    async def _resumed(self, request: Request, answer_id: str) -> tuple[Record, StoredAnswer | None]:
        """Return what `find` does. An answer of an earlier process is continued first, before the engine serves."""
        record, running = await self.find(request, answer_id)
        if running is not None or record.ended:
            return record, running
        await self._resume_answer(answer_id)
        return await self.find(request, answer_id)

    async def stream(self, request: Request, answer_id: str, after: int) -> Response:
        """Return the events of an answer after number `after`, and those to come."""
        record, running = await self._resumed(request, answer_id)
        if running is not None:
            return running.stream(after)
        if not record.events:
            failure = record.result.get("error")
            cause = f"failed: {failure['message']}" if failure else "was not created as a stream"
            raise RequestError(f"{answer_id!r:.80}: {cause}. Retrieve it without stream.", param="stream")
        events = StreamLog(record.events).follow(after, bytes, 1.0)
        return AnswerStream(events, record.id, lambda: None, EVENT_STREAM)

    async def cancel(self, request: Request, answer_id: str) -> Json:
        """Cancel an answer in the background and return its object. An ended answer stays as it is."""
        record, running = await self._resumed(request, answer_id)
        if not record.background:
            raise RequestError(
                f"{answer_id!r:.80}: only a response in the background can be cancelled. Close its connection."
            )
        if running is None:
            return record.result
        await running.cancel()
        return running.result()

    async def delete(self, request: Request, answer_id: str) -> None:
        """Delete an answer. One in progress is cancelled first."""
        _, running = await self._resumed(request, answer_id)
        if running is not None:
            await running.cancel()
        await self.journal.delete(answer_id)


def stored_of(request: Request) -> StoredAnswers:
    """Return the stored answers of the app that received `request`."""
    return cast(StoredAnswers, request.app.state.stored_answers)


def owner_of(request: Request) -> str:
    """Return the owner of the answers of a request: a digest of its API key, empty without keys."""
    return str(getattr(request.state, "owner", ""))


Prepare = Callable[[Api, Request], Awaitable[PreparedAnswer]]
"""A function that reads a request in one dialect. It raises RequestError, naming the client's field."""


async def serve_answer(request: Request, endpoint: str, prepare: Prepare) -> Response:
    """Answer one request: `prepare` reads it, the engine generates, the client gets a body or a stream.

    A stored stream, and an answer in the background, go on without the client.
    """
    api, client = api_of(request), client_of(request)
    meter = RequestMeter(api.metrics, endpoint, describe_client(request))
    try:
        prepared = await prepare(api, request)
    except BaseException as error:
        meter.end(outcome_of(error))
        raise
    for choice in prepared.answer.choices:
        choice.request = replace(choice.request, client=client)
    record = prepared.record
    if record is not None and (prepared.stream or record.background):
        answer = await stored_of(request).start(prepared, meter)
        if prepared.stream:
            return answer.stream()
        return JSONResponse(answer.result(), headers={"X-Request-Id": record.id})
    delivery = Delivery(api, prepared, meter)
    response = await (delivery.stream() if prepared.stream else delivery.send_whole(request))
    if record is not None and response.status_code == 200:
        stored_of(request).keep(prepared)
    return response
