"""Listening sockets: binding, bounds of calls, and the one port of a worker.

The port passes data connections to their calls and all other connections to the gRPC server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
from google.protobuf.message import Message

from proto.errors import DeadlineError, ProtocolError, UsageError
from proto.rpc.channels import FIRST_MESSAGE_SECONDS
from proto.rpc.data_connection import PREAMBLE, TICKET_BYTES
from proto.rpc.link import end_future

log = logging.getLogger(__name__)


class BackgroundTasks:
    """A set of running tasks. An exception in one of them is a bug and is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` as a task and keep a reference until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._remove)
        return task

    def _remove(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", exc_info=error)

    async def close(self) -> None:
        """Cancel all running tasks and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bind_listener(flags: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port`; port 0 chooses a free one.

    Raises UsageError naming `flags`, the options as the user writes them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"{flags}: {_problem(error)}") from error
    return listener


def own_addresses() -> list[str]:
    """Return the IP addresses of this machine's interfaces, without link-local ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    found = {entry.address for entry in entries if entry.family in families}
    return sorted(a for a in found if "%" not in a and not a.startswith("fe80:"))


def _problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there. Choose another port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return "the system reserves this port. Choose one above 1023, or 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"not an address of this machine. Its addresses are {', '.join(own_addresses())}"
    return f"{error.strerror}. Choose another address"


MAX_CONTROL_BYTES = 256 * 1024
"""Bytes of a control message. The largest names a path and the layers of a model, in a few kilobytes."""


MAX_TRANSFERS = 4
"""Bounds the transfers of weights to one worker at a time. A coordinator needs one, and one more after a cut."""

M = TypeVar("M")


def check_size(request: Message) -> None:
    """Raise ProtocolError for a control message above MAX_CONTROL_BYTES."""
    if (size := request.ByteSize()) > MAX_CONTROL_BYTES:
        raise ProtocolError(
            f"the call has {size} bytes. The limit of a control message is {MAX_CONTROL_BYTES}"
        )


async def first_message(requests: AsyncIterator[M]) -> M:
    """Return the first message of a stream. Raises DeadlineError without one, and ProtocolError at the end."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineError(
            f"the stream sent no message within {FIRST_MESSAGE_SECONDS:g} s"
        ) from None
    except StopAsyncIteration:
        raise ProtocolError("the stream ended before its first message") from None


SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors after which asyncio accepts no connection for a second, and then tries again."""

LOG_SECONDS = 60.0
"""Seconds. Shortest time between two warnings. asyncio reports each connection of a flood, hundreds a second."""


def warn_once_of_shortage(loop: asyncio.AbstractEventLoop) -> None:
    """Log failed accepts of the servers of `loop` as one warning in LOG_SECONDS. Other errors are logged as before."""
    logged, count = -math.inf, 0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception that no task expected."""
        nonlocal logged, count
        error = context.get("exception")
        accepting = "accept" in context["message"]
        if not (accepting and isinstance(error, OSError) and error.errno in SHORTAGES):
            loop.default_exception_handler(context)
            return
        count += 1
        if loop.time() >= logged + LOG_SECONDS:
            log.warning(
                "connections wait: %s. Raise the limit on open files, such as with ulimit -n",
                error.strerror,
                extra={"count": count},
            )
            logged, count = loop.time(), 0

    loop.set_exception_handler(handle)


MAX_CONNECTIONS = 256
"""Bounds the open connections to the gRPC server. A worker has fewer than ten, and each takes three descriptors."""

MAX_OF_PEER = 128
"""Bounds the open connections from one address. Several programs on one machine have fewer."""

PROVEN_BYTES = 32
"""Bytes that a peer has sent when its connection is not replaced: fewer than the first message of a member.

A stranger that sends more has 10 s for its handshake, and gRPC ends anything else.
"""

DESCRIPTORS_EACH = 4
"""Open files of this process for each permitted connection. One in four stays free for the engine and its files."""

REFUSED_LOG_SECONDS = 10.0
"""Seconds. Shortest time between two warnings about refused connections, because a flood would fill the log."""

BACKLOG = 128
"""Connections that the system accepts before the event loop does."""

CHUNK_BYTES = 2**18
"""Bytes that are copied at once."""

RETRY_SECONDS = 0.01
"""Seconds. Delay before looking again at a preamble that has arrived in part, and after a failed accept.

The delay before another look doubles up to LAST_RETRY_SECONDS, so that strangers cost no processor time.
"""

LAST_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class PortConnection:
    """One connection from the address `peer`, which has sent `received` bytes. `end` closes it."""

    peer: str
    end: Callable[[], object] = lambda: None
    received: int = 0


class Admission:
    """The bound on open connections, in all and from one address. A new one replaces the oldest of a stranger."""

    def __init__(self, limit: int, limit_of_peer: int = MAX_OF_PEER) -> None:
        self._limit, self._limit_of_peer = limit, limit_of_peer
        self._open: dict[PortConnection, None] = {}

    def admit(self, new: PortConnection) -> PortConnection | None:
        """Admit `new` if there is room. Return the connection to end: an earlier one in its place, or `new` itself."""
        own = [one for one in self._open if one.peer == new.peer]
        crowded = own if len(own) >= self._limit_of_peer else list(self._open)
        ended = None
        if crowded is own or len(self._open) >= self._limit:
            ended = next((one for one in crowded if one.received < PROVEN_BYTES), new)
        if ended is not new:
            self._open[new] = None
        if ended is not None:
            self._open.pop(ended, None)
        return ended

    def remove(self, connection: PortConnection) -> None:
        """Forget a connection that has ended, or that was passed on."""
        self._open.pop(connection, None)


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
        self._admission = Admission(connection_limit())
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
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files
                self._log_refused(str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            new = PortConnection(str(address[0]))
            ended = self._admission.admit(new)
            if ended is not None:
                self._log_refused(f"too many are open, last from {ended.peer}")
                ended.end()
            if ended is new:
                connection.close()
            else:
                new.end = self._tasks.spawn(self._sort(connection, new)).cancel
            await asyncio.sleep(0)  # those that were accepted before show what they have sent

    def _log_refused(self, reason: str) -> None:
        """Count a refused connection, and log the count if the last warning is old."""
        self._refused += 1
        if (now := time.monotonic()) >= self._logged + REFUSED_LOG_SECONDS:
            log.warning("connections refused", extra={"count": self._refused, "reason": reason})
            self._refused, self._logged = 0, now

    async def _sort(self, connection: socket.socket, admitted: PortConnection) -> None:
        """Find out the protocol of a connection and pass it on."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            admitted.received = len(connection.recv(PROVEN_BYTES, socket.MSG_PEEK))
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                ticket = await _read_ticket(connection, admitted)
            if ticket is None:
                await self._forward(connection, admitted)
            else:
                connection.setblocking(True)
                self._on_data(ticket, connection)
        except (OSError, TimeoutError):
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            self._admission.remove(admitted)

    async def _forward(self, connection: socket.socket, admitted: PortConnection) -> None:
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
            asyncio.create_task(_copy(client, to_server, admitted)),
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


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    counted: PortConnection | None = None,
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            if counted is not None:
                counted.received += len(data)
            writer.write(data)
            await writer.drain()


async def _read_ticket(connection: socket.socket, admitted: PortConnection) -> bytes | None:
    """Return the ticket of a data connection, or None for another protocol, of which nothing is read."""
    head, pause = len(PREAMBLE) + TICKET_BYTES, RETRY_SECONDS
    while True:
        await _readable(connection)
        data = connection.recv(head, socket.MSG_PEEK)
        admitted.received = len(data)
        if not data:
            raise ConnectionError("the peer ended the connection")
        if not data.startswith(PREAMBLE[: len(data)]):
            return None
        if len(data) == head:
            return connection.recv(head)[len(PREAMBLE) :]
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_RETRY_SECONDS)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, end_future, future, None)
    try:
        await future
    finally:
        loop.remove_reader(connection)
