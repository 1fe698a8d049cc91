"""The HTTP server's life: it answers until it is told to stop, and ends every open answer in a way its client sees."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

GRACE_SECONDS = 5
"""How long open answers may go on after SIGTERM."""

END_SECONDS = 5
"""How long clients may then take to receive the event that ends theirs."""


class HttpServer(uvicorn.Server):
    """uvicorn, which would cut what is open after its grace. Here `end_answers`, called then, gives each its end."""

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
        """Whether Ctrl-C ended it."""
        self._end_answers = end_answers

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and Ctrl-C. uvicorn's own raises the signal again afterwards, before workers are let go."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _told_to_stop(self, number: signal.Signals) -> None:
        self.interrupted |= number is signal.SIGINT
        self.handle_exit(number, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server."""
        ending = asyncio.create_task(self._end_late_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_answers(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._end_answers()
