"""Listeners and names: taken ports are refused, local names are found, and floods of a data port are bounded."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proto.errors import AccessError, UsageError
from proto.rpc import data_connection, listener
from proto.rpc.data_connection import PREAMBLE, TICKET_BYTES, DataPort
from proto.rpc.listener import bind_listener, has_listener

SECONDS = 60.0


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_port_of_another_program_is_refused(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are the same whether the system refuses the port, or the program that listens there answers."""
    monkeypatch.setattr(sys, "platform", platform)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert has_listener("0.0.0.0", port)
        with pytest.raises(UsageError, match=f"--listen x:{port}: another program listens there"):
            bind_listener(f"--listen x:{port}", "127.0.0.1", port)
    assert not has_listener("127.0.0.1", port)
    bind_listener("--listen", "127.0.0.1", port).close()


RESOLVER = """
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
typedef int (*lookup)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
int getaddrinfo(const char *n, const char *s, const struct addrinfo *h, struct addrinfo **r) {
    if (n && !strcmp(n, "mac-2.local")) n = "127.0.0.1";
    return ((lookup)dlsym(RTLD_NEXT, "getaddrinfo"))(n, s, h, r);
}
"""
"""A library that knows a name of the local network, as macOS does and as only `getaddrinfo` can ask it."""

CONNECT = """
import asyncio, socket
from proto.rpc.channels import open_channel

async def main():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with open_channel(f"mac-2.local:{listener.getsockname()[1]}", None) as channel:
            channel.get_state(try_to_connect=True)
            connection, _ = await asyncio.get_running_loop().run_in_executor(None, listener.accept)
            connection.close()

asyncio.run(asyncio.wait_for(main(), 20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the library is made for Linux")
def test_names_of_the_local_network_are_found(tmp_path: Path) -> None:
    """A channel asks the system for `mac-2.local`, which gRPC's own resolver does not know."""
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler is installed")
    library = tmp_path / "resolver.so"
    subprocess.run(
        [compiler, "-x", "c", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(library), "-"],
        input=RESOLVER.encode(),
        check=True,
        timeout=SECONDS,
    )
    subprocess.run(
        [sys.executable, "-c", CONNECT],
        env={**os.environ, "LD_PRELOAD": str(library)},
        check=True,
        timeout=SECONDS,
    )


LIMIT, FLOOD = 5, 40
TICKET = bytes(range(TICKET_BYTES))


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


@pytest.mark.parametrize("sent", [b"", PREAMBLE[:3]], ids=["nothing", "half of the preamble"])
async def test_a_silent_connection_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a ticket ends after the deadline, and the port still takes others."""
    monkeypatch.setattr(data_connection, "FIRST_MESSAGE_SECONDS", 0.3)
    accepted: list[bytes] = []

    def on_ticket(ticket: bytes, connection: socket.socket) -> None:
        accepted.append(ticket)
        connection.close()

    port = DataPort(socket.create_server(("127.0.0.1", 0)), on_ticket)
    port.start()
    async with asyncio.timeout(SECONDS):
        for first in (sent, PREAMBLE + TICKET):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(first)
            assert await reader.read() == b""
            writer.close()
    await port.close()
    assert accepted == [TICKET]
