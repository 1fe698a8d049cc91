"""`mtp-coord serve` between its start and its end, without sockets that answer."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from coordinator.server.serve import _run


async def test_told_to_stop_as_the_first_plan_gets_ready() -> None:
    """SIGTERM closes the listener while the plan is still being loaded; that it serves a moment later is no error."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = asyncio.Event()

    async def serve(sockets: list[socket.socket]) -> None:
        sockets[0].close()  # as uvicorn does first
        stopped.set()
        await asyncio.sleep(0.01)  # its connections end

    server: Any = SimpleNamespace(serve=serve, should_exit=False)
    loop: Any = SimpleNamespace(start=stopped.wait)
    options: Any = SimpleNamespace(model="m")
    async with asyncio.timeout(10):
        await _run(server, listener, loop, options)
