"""A worker's data port under a flood of connections: a bounded number waits, and the log stays short."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket

import pytest

from proto.errors import AccessError
from proto.rpc import listener
from proto.rpc.data_connection import PREAMBLE, TICKET_BYTES, DataPort

LIMIT, FLOOD = 5, 40
TICKET = bytes(range(TICKET_BYTES))
SECONDS = 20.0


async def flood(port: DataPort, hosts: tuple[str, ...]) -> int:
    """Open FLOOD silent connections from these addresses in turn, and return how many of them stay open."""
    opened = [
        await asyncio.open_connection("127.0.0.1", port.port, local_addr=(host, 0))
        for _, host in zip(range(FLOOD), itertools.cycle(hosts), strict=False)
    ]
    ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
    before, still_open = 0, FLOOD
    while still_open != before:
        await asyncio.sleep(0.3)
        before, still_open = still_open, sum(not end.done() for end in ends)
    for read, (_, writer) in zip(ends, opened, strict=True):
        read.cancel()
        writer.close()
    return still_open


@pytest.mark.parametrize("hosts", [("127.0.0.2",), ("127.0.0.2", "127.0.0.3", "127.0.0.4")])
async def test_a_flood_keeps_no_member_out(
    hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest connections without a ticket end, of one address or of all. One line of the log counts them."""
    monkeypatch.setattr(listener, "MAX_WAITING", LIMIT)
    accepted: list[bytes] = []

    def on_ticket(ticket: bytes, connection: socket.socket) -> None:
        accepted.append(ticket)
        connection.close()

    port = DataPort(socket.create_server(("127.0.0.1", 0)), on_ticket)
    port.start()
    with caplog.at_level(logging.WARNING, logger=listener.__name__):
        async with asyncio.timeout(SECONDS):
            early = len(hosts) == 1  # an address that floods ends its own connections only
            member = asyncio.open_connection("127.0.0.1", port.port)
            if early:
                reader, writer = await member
            assert await flood(port, hosts) == LIMIT - early
            if not early:
                reader, writer = await member
            writer.write(PREAMBLE + TICKET)
            assert await reader.read() == b""
            writer.close()
    await port.close()
    assert accepted == [TICKET]
    assert [record.getMessage() for record in caplog.records] == ["data connections refused"]


async def test_unknown_tickets_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Connections with guessed tickets are closed, and the log counts them in one line."""

    def refuse(ticket: bytes, connection: socket.socket) -> None:
        raise AccessError("the ticket is unknown")

    port = DataPort(socket.create_server(("127.0.0.1", 0)), refuse)
    port.start()
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(SECONDS):
            for _ in range(FLOOD):
                reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
                writer.write(PREAMBLE + TICKET)
                assert await reader.read() == b""
                writer.close()
    await port.close()
    assert [record.__dict__["reason"] for record in caplog.records] == ["the ticket is unknown"]
