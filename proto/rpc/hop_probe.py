"""The measurement of a hop on a new data connection: its delay, its speed, and the network interface that it uses.

The client sends single bytes, which the server returns. Then it sends bursts of growing length, each after its length,
and the server returns one byte for each. A length of 0 ends the measurement.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from dataclasses import dataclass

from proto.errors import ProtocolError
from proto.rpc.network_interface import interface_kind

ROUND_TRIPS = 3
"""Round trips that measure the delay. The shortest counts, because other work only makes them longer."""

BURSTS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the bursts that measure the speed. The last one takes 3 ms at 10 Gbit/s."""

LONG_ENOUGH_SECONDS = 4e-3
"""Seconds. A burst that takes this long is the last one: a slow link is not delayed by longer ones."""

PIECE_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class HopFigures:
    """The figures of one hop: seconds in one direction, bytes a second, and the kind of the network interface."""

    seconds: float
    bytes_per_second: float
    kind: str


def measure_hop(connection: socket.socket) -> HopFigures:
    """Return the figures of the hop that `connection` uses. Blocks; the caller bounds the time."""
    shortest = math.inf
    for _ in range(ROUND_TRIPS):
        started = time.monotonic()
        connection.sendall(b"?")
        _receive(connection, 1)
        shortest = min(shortest, time.monotonic() - started)
    speed = 0.0
    for nbytes in BURSTS:
        started = time.monotonic()
        connection.sendall(_LENGTH.pack(nbytes) + bytes(nbytes))
        _receive(connection, 1)
        seconds = time.monotonic() - started
        speed = max(speed, nbytes / max(seconds - shortest, seconds / 2))
        if seconds >= LONG_ENOUGH_SECONDS:
            break
    connection.sendall(_LENGTH.pack(0))
    own, peer = connection.getsockname()[0], connection.getpeername()[0]
    return HopFigures(shortest / 2, speed, interface_kind(own, peer))


def answer_probes(connection: socket.socket) -> None:
    """Do the server's part of `measure_hop`. Raises ProtocolError for more or longer bursts than BURSTS."""
    for _ in range(ROUND_TRIPS):
        connection.sendall(_receive(connection, 1))
    for longest in (*BURSTS, 0):
        (nbytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
        if nbytes == 0:
            return
        if nbytes > longest:
            raise ProtocolError(f"a burst of {nbytes} bytes exceeds {longest}")
        left = nbytes
        while left:
            left -= len(_receive(connection, min(left, PIECE_BYTES)))
        connection.sendall(b"!")


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes. Raises ProtocolError if the connection ends before."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ProtocolError("the connection ended during its handshake")
        data += piece
    return bytes(data)
