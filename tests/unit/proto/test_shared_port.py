"""A worker's port under a flood of connections: a bounded number is open, and the log stays short."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import socket

import pytest

from proto.rpc import listener
from proto.rpc.listener import (
    DESCRIPTORS_EACH,
    MAX_CONNECTIONS,
    PROVEN_BYTES,
    Admission,
    PortConnection,
    SharedPort,
    connection_limit,
)

LIMIT, FLOOD = 5, 40


def test_the_limit_leaves_descriptors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with 256 open files, as on macOS, admits a quarter of them as connections."""
    for soft, limit in ((256, 256 // DESCRIPTORS_EACH), (10**6, MAX_CONNECTIONS), (-1, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connection_limit() == limit


def test_a_flood_is_refused_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections beyond the limit end at once. They are logged together."""
    monkeypatch.setattr(listener, "connection_limit", lambda: LIMIT)

    async def flood() -> int:
        """Open FLOOD silent connections, and return how many of them stay open."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = SharedPort(listener, "/nowhere", lambda ticket, connection: None)
        port.start()
        opened = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(FLOOD)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
        for end in itertools.islice(asyncio.as_completed(ends), FLOOD - LIMIT):
            await end
        await asyncio.sleep(0.1)
        still_open = sum(not end.done() for end in ends)
        for read in ends:
            read.cancel()
        for _, writer in opened:
            writer.close()
        with contextlib.suppress(OSError):
            await port.close()
        return still_open

    with caplog.at_level(logging.WARNING, logger=listener.__name__):
        assert asyncio.run(asyncio.wait_for(flood(), 20)) == LIMIT
    assert [record.getMessage() for record in caplog.records] == ["connections refused"]


def test_a_new_connection_replaces_the_oldest_of_a_stranger() -> None:
    """A stranger keeps out neither members nor other strangers, and an address has its own bound."""
    admission = Admission(limit=4, limit_of_peer=3)
    mine = [PortConnection("a") for _ in range(3)]
    mine[0].received = PROVEN_BYTES
    assert [admission.admit(one) for one in mine] == [None, None, None]
    again = PortConnection("a")
    assert admission.admit(again) is mine[1], "the oldest of the same address that is no member"
    assert admission.admit(PortConnection("b")) is None
    assert admission.admit(PortConnection("c")) is mine[2], "the oldest of all"
    for one in (again, *mine):
        one.received = PROVEN_BYTES
    full = Admission(limit=2)
    members = [
        PortConnection("a", received=PROVEN_BYTES),
        PortConnection("b", received=PROVEN_BYTES),
    ]
    assert [full.admit(one) for one in members] == [None, None]
    late = PortConnection("c")
    assert full.admit(late) is late, "members are never ended"
    full.remove(members[0])
    assert full.admit(late) is None
