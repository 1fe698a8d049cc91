"""The HTTP server. At its end every open answer gets an error event, so that its client sees the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from coordinator.api.http_connection import Connections, HttpConnection

log = logging.getLogger(__name__)

GRACE_SECONDS = 5
"""Seconds. Maximum time for open answers to finish after SIGTERM."""

END_SECONDS = 5
"""Seconds. Maximum time for clients to receive the error event after `GRACE_SECONDS`."""

HANDSHAKE_SECONDS = 10.0
"""Seconds. Maximum time of a TLS handshake."""

BACKLOG = 256
"""Connections that wait to be accepted. The event loop accepts all of them at once, which takes about 10 ms."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that calls `end_answers` after `GRACE_SECONDS`, where uvicorn would cut open connections.

    `end_pages` ends at once the event streams of open pages, which would otherwise last for the whole grace.
    """

    def __init__(
        self,
        app: ASGIApp,
        end_answers: Callable[[], Awaitable[None]],
        end_pages: Callable[[], None],
        count_answers: Callable[[], int],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_SECONDS + END_SECONDS,
                lifespan="off",
            )
        )
        self.interrupted = False
        """True after Ctrl-C."""
        self._end_answers = end_answers
        self._end_pages = end_pages
        self._count_answers = count_answers

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and Ctrl-C. uvicorn's handler would raise the signal again before workers are released."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _handle_signal(self, number: signal.Signals) -> None:
        self.interrupted |= number is signal.SIGINT
        count = self._count_answers()
        if count and not self.should_exit:
            answers = f"{count} answer{'s' * (count > 1)}"
            log.info("ending %s within %d s; again to stop", answers, GRACE_SECONDS)
        self.handle_exit(number, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`. uvicorn has no option for the time of a handshake."""
        await self.lifespan.startup()
        connection = partial(
            HttpConnection,
            Connections(),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        tls = self.config.ssl
        self.servers = [
            await asyncio.get_running_loop().create_server(
                connection,
                sock=listener,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
            )
            for listener in sockets or []
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn.Server does, and end late answers meanwhile."""
        self._end_pages()
        ending = asyncio.create_task(self._end_late_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_answers(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._end_answers()
