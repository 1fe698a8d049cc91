"""A network of namespaces through the relay: packets arrive late, or in one direction only."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.chaos.network import Network, network, why_no_network
from tests.chaos.packet_link import Impairment

ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 7))
print("bound", flush=True)
while True:
    data, sender = server.recvfrom(2048)
    print(data.decode(), flush=True)
    server.sendto(data, sender)
"""

DELAY = 0.1


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    if reason := why_no_network():
        pytest.skip(reason)
    with network(1, seed=1) as made:
        yield made


def test_packets_are_delayed_and_cut_one_way(net: Network) -> None:
    """A delay holds each way. After a one-way cut the request arrives and its reply does not."""
    command = [*net.prefix(0), sys.executable, "-c", ECHO, net.address(0)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
    ):
        assert server.stdout is not None
        assert server.stdout.readline()
        client.settimeout(10)
        client.connect((net.address(0), 7))
        try:
            net.impair(0, Impairment(delay=DELAY))
            started = time.monotonic()
            client.send(b"late")
            assert client.recv(10) == b"late"
            assert time.monotonic() - started >= 2 * DELAY
            net.mend()
            net.cut(0, net.own)
            client.settimeout(0.5)
            client.send(b"lost")
            with pytest.raises(TimeoutError):
                client.recv(10)
            assert [server.stdout.readline() for _ in range(2)] == ["late\n", "lost\n"]
        finally:
            server.kill()
