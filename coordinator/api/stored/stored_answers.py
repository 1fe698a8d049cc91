"""The stored answers of one app: those in progress, and those in the journal. Each belongs to the key that made it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.answer.delivery import AnswerStream, PreparedAnswer
from coordinator.api.answer.generated_answer import RestoredAnswer
from coordinator.api.answer.writer import EVENT_STREAM
from coordinator.api.request.context import Api
from coordinator.api.stored.event_log import EventLog
from coordinator.api.stored.pinned_request import pinned_request
from coordinator.api.stored.stored_answer import StoredAnswer, StoredWriter
from coordinator.journal.journal import Journal
from coordinator.journal.record import Record
from coordinator.status.metrics import RequestMeter
from coordinator.text.model_info import Json
from proto.errors import ClusterError, NotReadyError, RequestError, StaleEpochError

log = logging.getLogger(__name__)

Restore = Callable[[Api, Record, RestoredAnswer], Awaitable[PreparedAnswer]]
"""A dialect's function that reads the body of a record again."""


class UnknownAnswerError(RequestError):
    """The request names an answer that is not stored, or that belongs to another key."""

    http_status = 404


class StoredAnswers:
    """The stored answers of one app. `restore` has the function of each dialect with stored answers."""

    def __init__(self, api: Api, journal: Journal, restore: Mapping[str, Restore]) -> None:
        self.journal = journal
        self._api = api
        self._restore = restore
        self._running: dict[str, StoredAnswer] = {}
        if api.options.key_ring is not None:
            api.options.key_ring.count_background = self.count_background

    # ---- life

    async def resume(self) -> None:
        """Continue the answers that an earlier process did not end. The engine must serve."""
        for record in await self.journal.unfinished():
            if record.id not in self._running:
                await self._resume_answer(record)

    async def suspend(self) -> None:
        """Stop all answers without an end; the next start continues them."""
        error = NotReadyError("the server is ending. Reconnect when it is back.")
        running = list(self._running.values())
        await asyncio.gather(*(answer.suspend(error) for answer in running))

    async def fail_all(self, error: ClusterError) -> None:
        """End all answers with `error`."""
        await asyncio.gather(*(answer.fail(error) for answer in list(self._running.values())))

    def count_background(self, owner: str) -> int:
        """Return the answers of `owner` in progress that have no client."""
        running = self._running.values()
        return sum(one.record.owner == owner and not one.has_clients for one in running)

    @property
    def in_progress(self) -> int:
        """The number of answers in progress."""
        return len(self._running)

    async def _resume_answer(self, record: Record) -> None:
        error: ClusterError
        try:
            if record.model != self._api.model.fingerprint:
                raise StaleEpochError("the server serves another model since its restart")
            requests = [pinned_request(content) for content in record.requests]
            restored = RestoredAnswer(requests, record.created)
            prepared = await self._restore[record.dialect](self._api, record, restored)
            answer = self._add(replace(prepared, record=record))
            answer.restore()
        except ClusterError as found:
            error = found
        except Exception:
            log.exception("stored answer not restored", extra={"id": record.id})
            error = ClusterError("the stored request cannot be read by this release")
        else:
            return
        log.warning("stored answer ended", extra={"id": record.id, "error": str(error)})
        failure = {"code": "server_error", "message": error.public}
        result = {**record.result, "status": "failed", "error": failure}
        self.journal.save(replace(record, ended=True, result=result))

    def _add(self, prepared: PreparedAnswer) -> StoredAnswer:
        assert prepared.record is not None
        answer_id = prepared.record.id
        answer = StoredAnswer(self._api, prepared, self.journal, partial(self._remove, answer_id))
        self._running[answer_id] = answer
        return answer

    def _remove(self, answer_id: str) -> None:
        self._running.pop(answer_id, None)

    # ---- answers

    async def start(self, prepared: PreparedAnswer, meter: RequestMeter) -> StoredAnswer:
        """Start an answer that goes on without its client. Raises the engine's refusal."""
        assert prepared.record is not None
        writer = cast(StoredWriter, prepared.writer)
        record = replace(prepared.record, result=writer.result("queued"))
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
        result = cast(StoredWriter, prepared.writer).result("ended")
        record = replace(prepared.record, ended=True, requests=(), result=result)
        self.journal.save(record)

    async def find(
        self, request: Request, answer_id: str, dialect: str, param: str | None = None
    ) -> StoredAnswer | Record:
        """Return an answer of the request's key: in progress, or from the journal.

        Raises UnknownAnswerError, which names the client's field `param`.
        """
        owner = owner_of(request)
        running = self._running.get(answer_id)
        record = running.record if running else await self.journal.find(answer_id)
        if record is None or (record.owner, record.dialect) != (owner, dialect):
            raise UnknownAnswerError(
                f"{answer_id!r:.80}: not found. It was not stored, or is too old.", param=param
            )
        return self._running.get(answer_id) or record

    async def result(self, request: Request, answer_id: str, dialect: str) -> Json:
        """Return the object of an answer, complete or not."""
        found = await self.find(request, answer_id, dialect)
        return found.result() if isinstance(found, StoredAnswer) else found.result

    async def stream(self, request: Request, answer_id: str, dialect: str, after: int) -> Response:
        """Return the events of an answer after number `after`, and those to come."""
        found = await self.find(request, answer_id, dialect)
        if isinstance(found, StoredAnswer):
            return found.stream(after)
        if not found.ended:
            raise NotReadyError("The answer is being restored. Try again later.")
        if not found.events:
            raise RequestError(
                f"{answer_id!r:.80}: was not created as a stream. Retrieve it without stream.",
                param="stream",
            )
        events = EventLog(events=found.events).follow(after, b"", 1.0)
        return AnswerStream(events, found.id, lambda: None, EVENT_STREAM)

    async def cancel(self, request: Request, answer_id: str, dialect: str) -> Json:
        """Cancel an answer in the background and return its object. An ended answer stays as it is."""
        found = await self.find(request, answer_id, dialect)
        record = found.record if isinstance(found, StoredAnswer) else found
        if not record.background:
            raise RequestError(
                f"{answer_id!r:.80}: only a response in the background can be cancelled. Close its connection."
            )
        if isinstance(found, StoredAnswer):
            await found.cancel()
            return found.result()
        return found.result

    async def delete(self, request: Request, answer_id: str, dialect: str) -> None:
        """Delete an answer. One in progress is cancelled first."""
        found = await self.find(request, answer_id, dialect)
        if isinstance(found, StoredAnswer):
            await found.cancel()
        await self.journal.delete(answer_id)


def stored_of(request: Request) -> StoredAnswers:
    """Return the stored answers of the app that received `request`."""
    return cast(StoredAnswers, request.app.state.stored_answers)


def owner_of(request: Request) -> str:
    """Return the owner of the answers of a request: a digest of its API key, empty without keys."""
    return str(getattr(request.state, "owner", ""))
