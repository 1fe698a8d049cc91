"""The outgoing hop, with a real gRPC server and one end of a pair of sockets as its data connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import psutil
import pytest

from proto.rpc import data_connection
from proto.rpc.data_connection import (
    FRAMES,
    SERVICE,
    TICKET_BYTES,
    HopFigures,
    StreamBinding,
    TicketOffer,
)
from proto.rpc.link import Link

PATIENCE = 10.0
"""Seconds. Deadline of each wait."""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Run a server that accepts a stream of frames and keeps it open, and yield its port."""

    async def accept(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(TicketOffer(bytes(TICKET_BYTES), 1).to_metadata())
        await asyncio.Event().wait()
        yield b""

    handler: Any = grpc.stream_stream_rpc_method_handler(accept)
    methods: dict[str, Any] = {FRAMES.rpartition("/")[2]: handler}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    found = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield found
    await server.stop(0)


def connections_to(port: int) -> int:
    """Return how many connections this process has to a port."""
    return len([c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port])


async def test_a_closed_link_has_no_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding of an ended plan may live on, and its connections must not."""
    near, far = socket.socketpair()
    figures = HopFigures(1e-4, 1e9)
    monkeypatch.setattr(data_connection, "dial", lambda *_: (near, figures))
    failures: list[Exception] = []
    link = Link(
        f"127.0.0.1:{port}",
        StreamBinding(1, 1, b"t"),
        timeout=PATIENCE,
        on_failure=failures.append,
    )
    assert await link.open() == figures
    assert connections_to(port) == 1
    await link.close()
    with far:
        far.settimeout(PATIENCE)
        assert far.recv(1) == b"", "the data connection has ended"
    async with asyncio.timeout(PATIENCE):
        while connections_to(port):  # noqa: ASYNC110 (gRPC closes it on a thread)
            await asyncio.sleep(0.02)
    assert not failures


async def test_a_link_that_is_given_up_closes_what_it_dials(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may end while a thread still opens the data connection. The thread closes it."""
    near, far = socket.socketpair()
    dialling, may_return = threading.Event(), threading.Event()

    def dial(*_: object) -> tuple[socket.socket, HopFigures]:
        dialling.set()
        may_return.wait(PATIENCE)
        return near, HopFigures(1e-4, 1e9)

    monkeypatch.setattr(data_connection, "dial", dial)
    binding = StreamBinding(1, 1, b"t")
    link = Link(f"127.0.0.1:{port}", binding, timeout=PATIENCE, on_failure=lambda _: None)
    opening = asyncio.create_task(link.open())
    await asyncio.to_thread(dialling.wait, PATIENCE)
    opening.cancel()
    await asyncio.wait({opening}, timeout=PATIENCE)
    may_return.set()
    with far:
        far.settimeout(PATIENCE)
        assert await asyncio.to_thread(far.recv, 1) == b""
    await link.close()
