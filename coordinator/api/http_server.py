"""The HTTP server. At its end every open answer gets an error event, so that its client sees the end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

GRACE_SECONDS = 5
"""Seconds. Maximum time for open answers to finish after SIGTERM."""

END_SECONDS = 5
"""Seconds. Maximum time for clients to receive the error event after `GRACE_SECONDS`."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that calls `end_answers` after `GRACE_SECONDS`, where uvicorn would cut open connections."""

    def __init__(self, app: FastAPI, end_answers: Callable[[], Awaitable[None]]) -> None:
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
        self.handle_exit(number, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn.Server does, and end late answers meanwhile."""
        ending = asyncio.create_task(self._end_late_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_answers(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._end_answers()
