"""Data connections and their port: one TCP connection per hop, opened by a ticket of a checked call, and measured."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from proto.announcement import host_of
from proto.errors import AccessError, ClusterError, DeadlineError, ProtocolError, WorkerLostError
from proto.local_network import with_advice
from proto.rpc.channels import FIRST_MESSAGE_SECONDS, peer_identity, tls_context
from proto.rpc.listener import Acceptor
from proto.trust.certificates import NodeIdentity, Role, host_name
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

SERVICE = "mtpcluster.v1.Pipeline"
FRAMES = f"/{SERVICE}/Frames"
RESULTS = f"/{SERVICE}/Results"

TOKEN_BYTES = 16
"""Bytes of a plan token: enough that nothing can guess it during an epoch."""

TICKET_BYTES = 32
"""Bytes of a ticket: enough that nothing can guess it while its call is open."""

_TICKET, _PORT = "mtp-ticket-bin", "mtp-data-port"
_EPOCH, _STAGE, _TOKEN = "mtp-epoch", "mtp-stage", "mtp-token-bin"


@dataclass(frozen=True)
class StreamBinding:
    """The values that bind one stream, served by stage number `stage`, to a plan. `token` is the plan's."""

    epoch: int
    stage: int
    token: bytes

    def to_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the gRPC metadata that opens the stream."""
        return (_EPOCH, str(self.epoch)), (_STAGE, str(self.stage)), (_TOKEN, self.token)

    @classmethod
    def from_metadata(cls, metadata: Sequence[tuple[str, str | bytes]]) -> StreamBinding:
        """Invert `to_metadata`, and ignore other entries. Raises ProtocolError for a missing or malformed entry."""
        found = dict(metadata)
        token = found.get(_TOKEN)
        if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise ProtocolError(f"stream metadata {_TOKEN} is missing or malformed")
        return cls(_decimal(found, _EPOCH), _decimal(found, _STAGE), token)


@dataclass(frozen=True)
class TicketOffer:
    """A worker's reply to the caller of a checked call: a ticket, and the port where it is valid once."""

    ticket: bytes
    port: int

    def to_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the initial metadata of the call."""
        return ((_TICKET, self.ticket), (_PORT, str(self.port)))

    @classmethod
    def from_metadata(cls, metadata: Iterable[tuple[str, str | bytes]] | None) -> TicketOffer:
        """Invert `to_metadata`. Raises ProtocolError when an entry is missing or malformed."""
        found = dict(metadata or ())
        ticket = found.get(_TICKET)
        if not isinstance(ticket, bytes) or len(ticket) != TICKET_BYTES:
            raise ProtocolError("the worker sent no ticket for a data connection")
        port = _decimal(found, _PORT)
        if not 0 < port < 2**16:
            raise ProtocolError(f"the worker sent the invalid data port {port}")
        return cls(ticket, port)


def _decimal(found: dict[str, str | bytes], name: str) -> int:
    text = found.get(name)
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise ProtocolError(f"stream metadata {name} is missing or not a number")
    return int(text)


PREAMBLE = b"MTPDATA\x01"
"""The first bytes of a data connection, which show another program that came to the wrong port."""


def dial(
    address: str, trust: NodeTrust | None, node: str, offer: TicketOffer, timeout: float
) -> tuple[socket.socket, HopFigures]:
    """Open a data connection to the worker whose calls go to `address`, and return it with the figures of the hop.

    With `trust` the worker must be of the same cluster and, if given, have the id `node`. Raises AccessError,
    DeadlineError or WorkerLostError.
    """
    due = time.monotonic() + timeout
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((host_of(address), offer.port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with _ended_at(connection, due):
            connection.sendall(PREAMBLE + offer.ticket)
            if trust is not None:
                name = host_name(trust.identity.cluster, Role.WORKER, node)
                context = tls_context(trust, server=False)
                connection = context.wrap_socket(connection, server_hostname=name)
            return connection, measure_hop(connection)
    except (OSError, ProtocolError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise AccessError(f"{address} refuses: {error.verify_message}") from error
        if time.monotonic() >= due or isinstance(error, TimeoutError):
            raise DeadlineError(
                f"opening a data connection to {address} timed out after {timeout:g} s (port {offer.port})"
            ) from error
        text = with_advice(str(getattr(error, "strerror", None) or error), host_of(address))
        raise WorkerLostError(f"{address} is lost: {text} (data port {offer.port})") from error


async def dial_on_thread(
    address: str, trust: NodeTrust | None, node: str, offer: TicketOffer, timeout: float
) -> tuple[socket.socket, HopFigures]:
    """Call `dial` on a thread. If the caller is cancelled meanwhile, the thread closes the connection."""
    dialled: Future[tuple[socket.socket, HopFigures]] = Future()
    dialled.set_running_or_notify_cancel()  # from now on the cancellation of the caller leaves it alone

    def work() -> None:
        try:
            dialled.set_result(dial(address, trust, node, offer, timeout))
        except Exception as error:
            dialled.set_exception(error)

    threading.Thread(target=work, name="dial", daemon=True).start()
    try:
        return await asyncio.wrap_future(dialled)
    except asyncio.CancelledError:
        dialled.add_done_callback(_close_connection)
        raise


def _close_connection(dialled: Future[tuple[socket.socket, HopFigures]]) -> None:
    if dialled.exception() is None:
        dialled.result()[0].close()


@dataclass(eq=False)
class Ticket:
    """The place of one call in DataTickets. `connection` is the data connection once it is open."""

    offer: TicketOffer
    peer: NodeIdentity | None
    connection: asyncio.Future[socket.socket]

    async def wait_for_connection(self) -> socket.socket:
        """Return the data connection, or raise DeadlineError or AccessError. One that arrives too late is closed."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                return await self.connection
        except (TimeoutError, asyncio.CancelledError) as end:
            if not self.connection.cancelled() and self.connection.exception() is None:
                self.connection.result().close()  # it arrived in the same moment
            if isinstance(end, TimeoutError):
                late = f"the caller opened no data connection within {FIRST_MESSAGE_SECONDS:g} s"
                raise DeadlineError(late) from None
            raise


class DataTickets:
    """The calls of a server that wait for their data connections. Only the event loop's thread calls its methods."""

    def __init__(self, trust: NodeTrust | None) -> None:
        self.port = 0
        """The port of the data connections, once it listens."""
        self._trust = trust
        self._issued: list[Ticket] = []

    @contextmanager
    def issued(self, peer: NodeIdentity | None) -> Iterator[Ticket]:
        """Issue a ticket to the caller `peer`, for one connection while the block runs."""
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        offer = TicketOffer(secrets.token_bytes(TICKET_BYTES), self.port)
        ticket = Ticket(offer, peer, future)
        self._issued.append(ticket)
        try:
            yield ticket
        finally:
            if ticket in self._issued:
                self._issued.remove(ticket)
            future.cancel()

    def accept(self, value: bytes, connection: socket.socket) -> None:
        """Complete the connection that presented the ticket `value`, on a thread. Raises AccessError."""
        found = [t for t in self._issued if hmac.compare_digest(t.offer.ticket, value)]
        if not found:
            raise AccessError("the ticket is unknown")
        self._issued.remove(found[0])
        work = partial(self._complete, found[0], connection, asyncio.get_running_loop())
        threading.Thread(target=work, name="data handshake", daemon=True).start()

    def _complete(self, ticket: Ticket, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Do the server's part of the handshake, on a thread of its own."""
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
        try:
            loop.call_soon_threadsafe(_deliver, ticket, connection, error)
        except RuntimeError:  # the loop has ended
            connection.close()

    def _secured(self, connection: socket.socket, peer: NodeIdentity | None) -> socket.socket:
        """Return the connection over TLS, if this node belongs to a cluster. The peer must be the caller."""
        if self._trust is None:
            return connection
        secured = tls_context(self._trust, server=True).wrap_socket(connection, server_side=True)
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


ROUND_TRIPS = 3
"""Round trips that measure the delay. The shortest counts."""

BURSTS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the bursts that measure the speed. The last one takes 3 ms at 10 Gbit/s."""

LONG_ENOUGH_SECONDS = 4e-3
"""Seconds. A burst that takes this long is the last one: a slow link is not delayed by longer ones."""

PIECE_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class HopFigures:
    """The figures of one hop: seconds in one direction, and bytes a second."""

    seconds: float
    bytes_per_second: float


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
    return HopFigures(shortest / 2, speed)


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
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ProtocolError("the connection ended during its handshake")
        data += piece
    return bytes(data)


class DataPort(Acceptor):
    """The bound `listener` of a worker's data connections.

    `on_ticket` gets their tickets and sockets on the event loop. It raises AccessError for an unknown ticket.
    """

    def __init__(self, listener: socket.socket, on_ticket: Callable[[bytes, socket.socket], None]) -> None:
        super().__init__(listener, self._receive_ticket, "data connections")
        self._on_ticket = on_ticket

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    async def _receive_ticket(self, connection: socket.socket) -> None:
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
