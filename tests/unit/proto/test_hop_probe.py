"""The measurement of a hop over real sockets."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from proto.errors import ProtocolError
from proto.rpc import data_connection
from proto.rpc.data_connection import BURSTS, answer_probes, measure_hop

DEADLINE = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), DEADLINE)
        server, _ = listener.accept()
        server.settimeout(DEADLINE)
        with client, server:
            yield client, server


def test_a_hop_has_its_time_and_its_speed(ends: tuple[socket.socket, socket.socket]) -> None:
    """Both sides finish together, and the next byte after the measurement is the client's own."""
    client, server = ends
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer_probes, server)
        figures = measure_hop(client)
        answered.result(DEADLINE)
    assert 0 < figures.seconds < 1
    assert 1e6 < figures.bytes_per_second < 1e12
    client.sendall(b"frame")
    assert server.recv(5) == b"frame"


DELAY = 1.0
"""Seconds. Long beside the delays of a busy machine."""


def test_the_time_of_a_hop_is_half_the_way_there_and_back(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop takes half of the time in which the peer answers. This time is no part of the speed."""
    client, server = ends
    read = data_connection._receive

    def slow(connection: socket.socket, count: int) -> bytes:
        """Delay what the client receives."""
        if connection is client:
            time.sleep(DELAY)
        return read(connection, count)

    monkeypatch.setattr(data_connection, "_receive", slow)
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer_probes, server)
        figures = measure_hop(client)
        answered.result(DEADLINE)
    assert DELAY / 2 <= figures.seconds < DELAY
    assert figures.bytes_per_second > BURSTS[0] / DELAY


@pytest.mark.timeout(20)
def test_a_connection_that_ends_ends_the_measurement(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Both sides report it instead of waiting for bytes that cannot come."""
    client, server = ends
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="ended during its handshake"):
        measure_hop(client)
    client.close()
    with pytest.raises((ProtocolError, ConnectionError)):
        answer_probes(server)


@pytest.mark.parametrize("bursts", [(BURSTS[0] + 1,), (*BURSTS, 1)])
def test_a_client_cannot_send_more_than_the_bursts(
    ends: tuple[socket.socket, socket.socket], bursts: tuple[int, ...]
) -> None:
    """A burst that is longer than agreed, and one more burst, end the handshake."""
    client, server = ends
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(answer_probes, server)
        client.sendall(b"???")
        for nbytes in bursts[:-1]:
            client.sendall(struct.pack("<I", nbytes) + bytes(nbytes))
        client.sendall(struct.pack("<I", bursts[-1]))
        with pytest.raises(ProtocolError, match="exceeds"):
            answered.result(DEADLINE)
