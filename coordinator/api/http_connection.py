"""One HTTP connection, with deadlines for its client, and the bound on open connections."""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.api.request.errors import error_response
from proto.errors import NotReadyError

log = logging.getLogger(__name__)

UVICORN_LOG = logging.getLogger("uvicorn.error.connection")
"""The log of uvicorn's connections, without its warning for every invalid request: strangers would fill the disk."""

UVICORN_LOG.setLevel(logging.ERROR)

MAX_CONNECTIONS = 1024
"""Connections. Bounds their memory, about 20 KB each. Each answer needs one, and so does each open page."""

HEAD_SECONDS = 20.0
"""Seconds. Maximum time without a complete request head, from the connection or the last answer on."""

STALL_SECONDS = 30.0
"""Seconds. Maximum time in which a client takes no byte of a full send buffer. A lost client does the same."""


def connection_limit() -> int:
    """Return the maximum number of connections. Half of the open files stay free for workers and the model."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


@dataclass
class Connections:
    """The bound on open connections. `waiting` has those without a complete request, the longest wait first."""

    limit: int = field(default_factory=connection_limit)
    waiting: dict[HttpConnection, None] = field(default_factory=dict)


class HttpConnection(H11Protocol):
    """A connection whose client must send its requests and read its answers in time.

    Beyond the limit, the connection is ended that waits for the rest of a request for the longest time. If all have
    complete requests, the new connection is refused with status 503.
    """

    def __init__(self, bound: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._bound = bound
        self.logger = UVICORN_LOG
        self._deadline: asyncio.TimerHandle | None = None
        self._unsent = 0

    @property
    def is_idle(self) -> bool:
        """True while no request is open."""
        # uvicorn's annotation omits the None before the first request
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    @property
    def is_waiting(self) -> bool:
        """True while the server waits for a request or for its body."""
        return self.is_idle or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) > self._bound.limit and not self._end_longest_wait():
            transport.write(_refusal())
            transport.close()
            return
        self._become_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._bound.waiting.pop(self, None)
        self._stop_deadline()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Read requests as uvicorn does."""
        super().handle_events()
        if not self.is_waiting:
            self._bound.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._become_idle()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to watch a client that does not read."""
        super().pause_writing()
        self._start_deadline(STALL_SECONDS)

    def _become_idle(self) -> None:
        self._bound.waiting.pop(self, None)
        self._bound.waiting[self] = None
        self._start_deadline(HEAD_SECONDS)

    def _end_longest_wait(self) -> bool:
        """End the connection whose request is incomplete for the longest time. Return False if there is none."""
        for oldest in self._bound.waiting:
            if oldest is not self:
                self._bound.waiting.pop(oldest)
                oldest.transport.abort()
                return True
        return False

    def _start_deadline(self, seconds: float) -> None:
        self._stop_deadline()
        self._unsent = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(seconds, self._check_progress)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_progress(self) -> None:
        """End a connection whose client took no byte since the last check, or sent no complete head."""
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:
            self._start_deadline(STALL_SECONDS)
        elif unsent and (self.flow.write_paused or self.is_idle):
            log.info("connection ended: the client does not read", extra={"unsent_bytes": unsent})
            self.transport.abort()
        elif self.is_idle:
            self.transport.abort()


def _refusal() -> bytes:
    """Return the answer to a client that connects while every connection has an open request."""
    answer = error_response(NotReadyError("Too many connections are open. Try again later."))
    fields = [*answer.raw_headers, (b"connection", b"close")]
    head = b"".join(b"%s: %s\r\n" % field for field in fields)
    return b"HTTP/1.1 503 Service Unavailable\r\n%s\r\n%s" % (head, answer.body)
