"""The life of `mtp-coord serve`, without a model."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from coordinator.serve.server import _run


async def test_a_stop_while_the_first_plan_gets_ready_is_no_error() -> None:
    """SIGTERM closes the listener while the plan is loading. A plan that serves a moment later is no error."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = asyncio.Event()

    async def serve(sockets: list[socket.socket]) -> None:
        sockets[0].close()  # as uvicorn does first
        stopped.set()
        await asyncio.sleep(0.01)  # its connections end

    server: Any = SimpleNamespace(serve=serve, should_exit=False)

    async def start() -> None:
        await stopped.wait()

    async with asyncio.timeout(10):
        await _run(server, "http://127.0.0.1:1", listener, start(), "m")
