"""The port of a worker's data connections. It closes a connection without a ticket, and bounds those that wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from proto.errors import ProtocolError
from proto.rpc.channels import FIRST_MESSAGE_SECONDS
from proto.rpc.data_connection import PREAMBLE, TICKET_BYTES
from proto.rpc.listener import Acceptor


class DataPort(Acceptor):
    """The bound `listener` of a worker's data connections.

    `on_ticket` gets the ticket and the socket of each connection, on the event loop. It raises AccessError for an
    unknown ticket.
    """

    def __init__(
        self, listener: socket.socket, on_ticket: Callable[[bytes, socket.socket], None]
    ) -> None:
        super().__init__(listener, self._receive_ticket, "data connections")
        self._on_ticket = on_ticket

    @property
    def port(self) -> int:
        """The port number."""
        return int(self._listener.getsockname()[1])

    async def _receive_ticket(self, connection: socket.socket) -> None:
        """Pass on a connection with its ticket. Raises ProtocolError or OSError for another one."""
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            head = await _receive_exactly(connection, len(PREAMBLE) + TICKET_BYTES)
        if not head.startswith(PREAMBLE):
            raise ProtocolError("another protocol")
        connection.setblocking(True)
        self._on_ticket(head[len(PREAMBLE) :], connection)


async def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes and read no more, because TLS follows them. Raises ConnectionError at the end."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(connection, count - len(data))
        if not piece:
            raise ConnectionError("the peer ended the connection")
        data += piece
    return data
