"""The port of a worker's data connections. It closes a connection without a ticket, and bounds those that wait."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable

from proto.errors import ProtocolError
from proto.rpc.channels import FIRST_MESSAGE_SECONDS
from proto.rpc.data_connection import PREAMBLE, TICKET_BYTES
from proto.rpc.listener import BackgroundTasks

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Bounds the connections that have sent no ticket yet. Members send theirs at once."""

MAX_WAITING_OF_PEER = 128
"""Bounds those of one address."""

REFUSED_LOG_SECONDS = 10.0
"""Seconds. Shortest time between two warnings about refused connections, because a flood would fill the log."""

BACKLOG = 128
"""Connections that the system accepts before the event loop does."""

RETRY_SECONDS = 0.01
"""Seconds. Delay after a failed accept, such as for lack of open files."""


class DataPort:
    """The bound `listener` of a worker's data connections.

    `on_ticket` gets the ticket and the socket of each connection, on the event loop. A new connection replaces the
    oldest one without a ticket, of the same address first, when as many as permitted wait.
    """

    def __init__(
        self, listener: socket.socket, on_ticket: Callable[[bytes, socket.socket], None]
    ) -> None:
        self._listener = listener
        self._on_ticket = on_ticket
        self._tasks = BackgroundTasks()
        self._waiting: dict[asyncio.Task[None], str] = {}
        """The tasks of the connections without a ticket, oldest first, with their addresses."""
        self._refused, self._logged = 0, -math.inf

    @property
    def port(self) -> int:
        """The port number."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Listen and accept connections."""
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._tasks.spawn(self._accept())

    async def close(self) -> None:
        """Stop listening, and close the connections that wait."""
        await self._tasks.close()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files
                self._log_refused(str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._make_room(str(address[0]))
            task = self._tasks.spawn(self._receive_ticket(connection))
            self._waiting[task] = str(address[0])
            task.add_done_callback(lambda task: self._waiting.pop(task, None))
            await asyncio.sleep(0)  # those that were accepted before show what they have sent

    def _make_room(self, peer: str) -> None:
        """End the oldest connection without a ticket, of `peer` or of all, if as many as permitted wait."""
        crowded = [task for task, address in self._waiting.items() if address == peer]
        if len(crowded) < MAX_WAITING_OF_PEER:
            crowded = list(self._waiting)
            if len(crowded) < MAX_WAITING:
                return
        self._log_refused(f"too many wait without a ticket, last from {self._waiting[crowded[0]]}")
        del self._waiting[crowded[0]]
        crowded[0].cancel()

    def _log_refused(self, reason: str) -> None:
        """Count a refused connection, and log the count if the last warning is old."""
        self._refused += 1
        if (now := time.monotonic()) >= self._logged + REFUSED_LOG_SECONDS:
            log.warning(
                "data connections refused", extra={"count": self._refused, "reason": reason}
            )
            self._refused, self._logged = 0, now

    async def _receive_ticket(self, connection: socket.socket) -> None:
        """Pass on a connection with its ticket. Close one that sends something else, or nothing in time."""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                head = await _receive_exactly(connection, len(PREAMBLE) + TICKET_BYTES)
            if not head.startswith(PREAMBLE):
                raise ProtocolError("another protocol")
            connection.setblocking(True)
        except (OSError, ProtocolError):  # OSError includes TimeoutError
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        else:
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
