"""The one port of a worker: it passes data connections to their calls and all other connections to the gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import time
from collections.abc import Callable

from proto.rpc.background_tasks import BackgroundTasks
from proto.rpc.call_bounds import FIRST_MESSAGE_SECONDS
from proto.rpc.data_plane import TICKET_BYTES
from proto.rpc.data_socket import PREAMBLE
from proto.rpc.frame_reader import end_future

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Bounds the open connections to the gRPC server. A worker has fewer than ten, and each takes three descriptors."""

DESCRIPTORS_EACH = 4
"""Open files of this process for each permitted connection. One in four stays free for the engine and its files."""

LOG_SECONDS = 10.0
"""Seconds. Shortest time between two warnings about refused connections, because a flood would fill the log."""

BACKLOG = 128
"""Connections that the system accepts before the event loop does."""

CHUNK_BYTES = 2**18
"""Bytes that are copied at once."""

RETRY_SECONDS = 0.01
"""Seconds. Delay before looking again at a preamble that has arrived in part, and after a failed accept."""


class SharedPort:
    """A bound `listener` in front of the gRPC server at the Unix socket `grpc_path`.

    `on_data` gets the ticket and the socket of each data connection, on the event loop.
    """

    def __init__(
        self,
        listener: socket.socket,
        grpc_path: str,
        on_data: Callable[[bytes, socket.socket], None],
    ) -> None:
        self._listener = listener
        self._grpc_path = grpc_path
        self._on_data = on_data
        self._tasks = BackgroundTasks()
        self._open = 0
        self._limit = connection_limit()
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
        """Stop listening and end all connections to the gRPC server."""
        await self._tasks.close()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files
                self._log_refused(str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if self._open >= self._limit:
                self._log_refused(f"{self._open} are open")
                connection.close()
                continue
            self._open += 1
            self._tasks.spawn(self._sort(connection))

    def _log_refused(self, reason: str) -> None:
        """Count a refused connection, and log the count if the last warning is old."""
        self._refused += 1
        if (now := time.monotonic()) >= self._logged + LOG_SECONDS:
            log.warning("connections refused", extra={"count": self._refused, "reason": reason})
            self._refused, self._logged = 0, now

    async def _sort(self, connection: socket.socket) -> None:
        """Find out the protocol of a connection and pass it on."""
        connection.setblocking(False)
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                ticket = await _read_ticket(connection)
            if ticket is None:
                await self._forward(connection)
            else:
                connection.setblocking(True)
                self._on_data(ticket, connection)
        except (OSError, TimeoutError):
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            self._open -= 1

    async def _forward(self, connection: socket.socket) -> None:
        """Copy both directions between the client and the gRPC server until one of them ends."""
        client, to_client = await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
        try:
            server, to_server = await asyncio.open_unix_connection(
                self._grpc_path, limit=CHUNK_BYTES
            )
        except OSError:
            to_client.close()
            raise
        copies = {
            asyncio.create_task(_copy(client, to_server)),
            asyncio.create_task(_copy(server, to_client)),
        }
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            to_client.close()
            to_server.close()


def connection_limit() -> int:
    """Return the maximum number of open connections that this process's limit of open files permits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else min(MAX_CONNECTIONS, soft // DESCRIPTORS_EACH)
    )


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def _read_ticket(connection: socket.socket) -> bytes | None:
    """Return the ticket of a data connection, or None for another protocol, of which nothing is read."""
    head = len(PREAMBLE) + TICKET_BYTES
    while True:
        await _readable(connection)
        data = connection.recv(head, socket.MSG_PEEK)
        if not data:
            raise ConnectionError("the peer ended the connection")
        if not data.startswith(PREAMBLE[: len(data)]):
            return None
        if len(data) == head:
            return connection.recv(head)[len(PREAMBLE) :]
        await asyncio.sleep(RETRY_SECONDS)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, end_future, future, None)
    try:
        await future
    finally:
        loop.remove_reader(connection)
