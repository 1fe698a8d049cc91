"""One stored answer while it is generated: it goes on without its client, and its tokens reach the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Literal, Protocol, cast

from starlette.responses import Response

from coordinator.api.answer.delivery import (
    AnswerStream,
    Delivery,
    IndexedEvent,
    PreparedAnswer,
)
from coordinator.api.answer.writer import AnswerWriter
from coordinator.api.request.context import Api
from coordinator.api.stored.event_log import EventLog
from coordinator.journal.journal import Journal
from coordinator.status.metrics import RequestMeter
from coordinator.text.model_info import Json
from proto.errors import CapacityError, ClusterError, NotReadyError

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 10.0
"""Seconds. An answer that is not in the background is cancelled when all its clients are gone for this long."""

REFUSAL_SECONDS = 0.1
"""Seconds. Wait for the engine to reject a request in the background. It rejects in its first step."""

RETRY_SECONDS = 1.0
"""Seconds before a restored answer tries again to enter the queue."""

AnswerStatus = Literal["queued", "in_progress", "ended", "failed", "cancelled"]


class StoredWriter(AnswerWriter, Protocol):
    """The writer of a dialect with stored answers."""

    def result(self, status: AnswerStatus) -> Json:
        """Return the object that clients retrieve, at this moment."""
        ...

    def cancelled(self) -> bytes:
        """Return the end of a stream that was cancelled."""
        ...

    def interrupted(self, error: Exception) -> bytes:
        """Return the end of a connection whose stream goes on later. It changes no state."""
        ...


class StoredAnswer:
    """A stored answer in progress. `on_end` is called after its end; `log` has its events."""

    def __init__(
        self, api: Api, prepared: PreparedAnswer, journal: Journal, on_end: Callable[[], None]
    ) -> None:
        assert prepared.record is not None
        assert len(prepared.answer.choices) == 1, "the order of events must follow from the tokens"
        self.record = prepared.record
        self.writer = cast(StoredWriter, prepared.writer)
        self.log = EventLog(self.record.id if self.record.dialect == "chat" else "")
        self._api = api
        self._prepared = prepared
        self._choice = prepared.answer.choices[0]
        self._journal = journal
        self._on_end = on_end
        self._status: AnswerStatus = "queued"
        self._written = 0  # tokens in the journal
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._cancellation: asyncio.Task[None] | None = None

    # ---- life

    async def start(self, meter: RequestMeter) -> None:
        """Begin to generate. Raises the engine's refusal."""
        delivery = Delivery(self._api, self._prepared, meter)
        wait = REFUSAL_SECONDS if self.record.background else self._api.options.keep_alive_seconds
        first = await delivery.first_event(wait)
        # Before the client learns the id.
        await self._journal.save_now(self.record)
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

    @property
    def has_clients(self) -> bool:
        """True while a client reads the events."""
        return self._clients > 0

    def stream(self, after: int = -1) -> Response:
        """Return the stream of the events after number `after`."""
        self._clients += 1
        if self._expiry is not None:
            self._expiry.cancel()
        return AnswerStream(
            self.follow(after), self.record.id, self._lose_client, self.writer.media_type
        )

    def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `after`, until the end."""
        seconds = self._api.options.keep_alive_seconds
        return self.log.follow(after, self.writer.keep_alive(), seconds)

    def _lose_client(self) -> None:
        self._clients -= 1
        if self._clients or self.record.background or self._task is None or self._task.done():
            return
        self._expiry = asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._expire)

    def _expire(self) -> None:
        if not self._clients and self._task is not None and not self._task.done():
            log.info("request cancelled: no client reconnected", extra={"id": self.record.id})
            self._cancellation = asyncio.create_task(self.cancel())

    # ---- the task

    async def _run_restored(self) -> None:
        seconds = self._api.options.keep_alive_seconds
        while True:
            meter = self._api.metrics.begin(self.record.dialect)
            delivery = Delivery(self._api, self._prepared, meter, opened=True)
            try:
                complete = self._prepared.answer.done
                first = None if complete else await delivery.first_event(seconds)
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
        self._status = "in_progress"
        try:
            async for content in delivery.chunks(first):
                self.log.append(content)
                self._write_tokens()
        finally:
            delivery.close()
        self._end("failed" if delivery.outcome in ("error", "refused") else "ended")

    def _write_tokens(self) -> None:
        """Queue the new tokens for the journal. With log-probabilities the answer is generated again instead."""
        new = tuple(self._choice.generated[self._written :])
        if new and self._choice.request.params.logprobs is None:
            self._journal.append_tokens(self.record.id, self._written, new)
            self._written += len(new)

    async def _stop(self, status: AnswerStatus, last: bytes = b"") -> None:
        if self._task is None or self._task.done():
            return
        self._status = status
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if status == "in_progress":
            self._write_tokens()
        else:
            self._end(status, last or self.writer.cancelled())

    def _end(self, status: AnswerStatus, last: bytes = b"") -> None:
        self._status = status
        if last:
            self.log.append(last)
        self.record = replace(
            self.record, ended=True, result=self.writer.result(status), events=self.log.events
        )
        self._journal.save(self.record)
        self.log.end()
        self._on_end()
