"""Data connections: the TCP connections that carry frames, opened for a gRPC call that has passed all checks.

The server of a call of `proto.rpc.data_plane` sends a ticket in the initial metadata. The client connects to the same
address again and sends `PREAMBLE` and the ticket. A ticket is random. It is valid for one connection, while its call is
open. A program without a ticket reaches no more than a comparison of bytes. In a cluster mutual TLS follows, and
the peer must be the node that made the call. Then the client measures the hop (`proto.rpc.hop_probe`). From then on
bytes travel in one direction only. The call stays open. Its status says why the hop ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proto.address import host_of
from proto.errors import AccessError, ClusterError, DeadlineError, ProtocolError, WorkerLostError
from proto.rpc.call_bounds import FIRST_MESSAGE_SECONDS
from proto.rpc.data_plane import TICKET_BYTES
from proto.rpc.hop_probe import HopFigures, answer_probes, measure_hop
from proto.rpc.local_network import with_advice
from proto.rpc.tls import client_context, peer_identity, server_context
from proto.trust.identity import NodeIdentity, Role, host_name
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

PREAMBLE = b"MTPDATA\x01"
"""The first bytes of a data connection. TLS and HTTP/2, the other protocols of the port, begin with other bytes."""


def dial(
    address: str, trust: NodeTrust | None, node: str, ticket: bytes, timeout: float
) -> tuple[socket.socket, HopFigures]:
    """Open a data connection to a worker and return it with the figures of the hop. Blocks for at most `timeout`.

    With `trust` the worker must be of the same cluster and, if `node` is given, have that node id. Raises AccessError,
    DeadlineError or WorkerLostError.
    """
    host, port = host_of(address), int(address.rpartition(":")[2])
    due = time.monotonic() + timeout
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((host, port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _ended_at(connection, due):
            connection.sendall(PREAMBLE + ticket)
            if trust is not None:
                name = host_name(trust.identity.cluster, Role.WORKER, node)
                connection = client_context(trust).wrap_socket(connection, server_hostname=name)
            return connection, measure_hop(connection)
    except (OSError, ProtocolError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise AccessError(f"{address} refuses: {error.verify_message}") from error
        if time.monotonic() >= due or isinstance(error, TimeoutError):
            raise DeadlineError(
                f"opening a connection to {address} timed out after {timeout:g} s"
            ) from error
        text = with_advice(str(getattr(error, "strerror", None) or error))
        raise WorkerLostError(f"{address} is lost: {text}") from error


@dataclass(eq=False)
class Ticket:
    """The place of one call in DataTickets. `connection` is the data connection once it is open."""

    value: bytes
    peer: NodeIdentity | None
    connection: asyncio.Future[socket.socket]

    async def wait_for_connection(self) -> socket.socket:
        """Return the data connection of the call. Raises DeadlineError without one, and AccessError."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                return await asyncio.shield(self.connection)
        except TimeoutError:
            raise DeadlineError(
                f"the caller opened no data connection within {FIRST_MESSAGE_SECONDS:g} s"
            ) from None


class DataTickets:
    """The calls of a server that wait for their data connections. Only the event loop's thread calls its methods."""

    def __init__(self, trust: NodeTrust | None) -> None:
        self._trust = trust
        self._issued: list[Ticket] = []

    @contextmanager
    def issued(self, peer: NodeIdentity | None) -> Iterator[Ticket]:
        """Issue a ticket to the caller `peer`, for one connection while the block runs."""
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        ticket = Ticket(secrets.token_bytes(TICKET_BYTES), peer, future)
        self._issued.append(ticket)
        try:
            yield ticket
        finally:
            if ticket in self._issued:
                self._issued.remove(ticket)
            future.cancel()

    def accept(self, value: bytes, connection: socket.socket) -> None:
        """Complete the connection that presented the ticket `value`, on a thread, or close it."""
        found = [t for t in self._issued if hmac.compare_digest(t.value, value)]
        if not found:
            log.warning("data connection refused: its ticket is unknown")
            connection.close()
            return
        self._issued.remove(found[0])
        loop = asyncio.get_running_loop()
        work = threading.Thread(
            target=self._complete,
            args=(found[0], connection, loop),
            name="data handshake",
            daemon=True,
        )
        work.start()

    def _complete(
        self, ticket: Ticket, connection: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Do the server's part of the handshake. Runs on a thread of its own."""
        error: ClusterError | None = None
        try:
            connection.settimeout(FIRST_MESSAGE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with _ended_at(connection, time.monotonic() + FIRST_MESSAGE_SECONDS):
                connection = self._secured(connection, ticket.peer)
                answer_probes(connection)
        except (OSError, ClusterError) as failure:
            log.warning("data connection refused", extra={"error": str(failure)})
            connection.close()
            error = AccessError("the handshake of the data connection failed")
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_deliver, ticket, connection, error)

    def _secured(self, connection: socket.socket, peer: NodeIdentity | None) -> socket.socket:
        """Return the connection over TLS, if this node belongs to a cluster. The peer must be the caller."""
        if self._trust is None:
            return connection
        secured = server_context(self._trust).wrap_socket(connection, server_side=True)
        try:
            found = peer_identity(secured)
            self._trust.check_peer(found)
            if found != peer:
                raise AccessError("the data connection is of another node than its call")
        except AccessError:
            secured.close()
            raise
        return secured


def shut_down(connection: socket.socket) -> None:
    """End a connection, so that a thread that reads from it or writes to it stops."""
    with contextlib.suppress(OSError):
        # Not the method of SSLSocket, which drops the encryption first.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _deliver(ticket: Ticket, connection: socket.socket, error: ClusterError | None) -> None:
    """Hand a connection to the call that waits for it. Runs on the event loop."""
    if ticket.connection.done():
        connection.close()
    elif error is not None:
        ticket.connection.set_exception(error)
    else:
        ticket.connection.set_result(connection)


@contextmanager
def _ended_at(connection: socket.socket, due: float) -> Iterator[None]:
    """Shut `connection` down at `due` in `time.monotonic` unless the block ends before."""
    # A copy, because TLS takes the socket out of the object that it wraps.
    copy = connection.dup()
    timer = threading.Timer(max(0.0, due - time.monotonic()), shut_down, (copy,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        copy.close()
