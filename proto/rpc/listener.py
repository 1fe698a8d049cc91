"""Listening sockets: binding, their errors, unproven connections, background tasks, and the bounds of calls."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from proto.errors import AccessError, ClusterError, DeadlineError, ProtocolError, UsageError
from proto.rpc.channels import FIRST_MESSAGE_SECONDS

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def bind_listener(flags: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port`; port 0 chooses a free one. Raises UsageError that names `flags`."""
    # macOS lets a listener on every interface and one on a single address have the same port.
    if sys.platform == "darwin" and port and has_listener(host, port):
        raise UsageError(f"{flags}: {_problem(OSError(errno.EADDRINUSE, ''))}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, because asyncio sets TCP_NODELAY only on connections that know it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == "::":  # both families, also where the system's default is one
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"{flags}: {_problem(error)}") from error
    return listener


def has_listener(host: str, port: int) -> bool:
    """Return whether a program answers at `port` of `host`. The address of all interfaces means loopback."""
    try:
        with socket.create_connection((host, port), timeout=0.5) as connection:
            own, other = connection.getsockname(), connection.getpeername()
            return bool(own != other)  # TCP can connect to itself
    except OSError:
        return False


MAX_WAITING = 256
"""Bounds the connections of a listener that have not proven anything yet. Honest peers take a few milliseconds."""

REFUSED_LOG_SECONDS = 10.0
"""Seconds. Shortest time between two warnings about refused connections, because a flood would fill the log."""

BACKLOG = 128
"""Connections that the system accepts before the event loop does."""

RETRY_SECONDS = 0.01
"""Seconds. Delay after a failed accept, such as for lack of open files."""


@dataclass(eq=False)
class Acceptor:
    """The connections of the bound `listener`, while `greet` finds out in a task for each whether its peer may stay.

    A new connection replaces the oldest one that waits, of the same address first, when as many as permitted wait. A
    connection is closed when `greet` is cancelled, or raises OSError or ClusterError. `name` is for the log.
    """

    listener: socket.socket
    greet: Callable[[socket.socket], Coroutine[Any, Any, object]]
    name: str

    def __post_init__(self) -> None:
        self._tasks = BackgroundTasks()
        self._waiting: dict[asyncio.Task[None], str] = {}
        """The tasks of the connections that wait, oldest first, with their addresses."""
        self._refused, self._logged = 0, -math.inf

    def start(self) -> None:
        """Listen and accept connections."""
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self._tasks.spawn(self._accept())

    async def close(self) -> None:
        """Stop listening, and close the connections that wait."""
        await self._tasks.close()
        self.listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self.listener)
            except OSError as error:  # such as too many open files
                self._log_refused(str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._make_room(str(address[0]))
            task = self._tasks.spawn(self._admit(connection))
            self._waiting[task] = str(address[0])
            task.add_done_callback(lambda task: self._waiting.pop(task, None))
            await asyncio.sleep(0)  # those that were accepted before show what they have sent

    def _make_room(self, peer: str) -> None:
        """End the oldest connection that waits, of `peer` if it has any, if as many as permitted wait."""
        if len(self._waiting) < MAX_WAITING:
            return
        own = (task for task, address in self._waiting.items() if address == peer)
        oldest = next(own, next(iter(self._waiting)))
        self._log_refused(f"too many wait, last from {self._waiting.pop(oldest)}")
        oldest.cancel()

    async def _admit(self, connection: socket.socket) -> None:
        try:
            await self.greet(connection)
        except AccessError as error:
            connection.close()
            self._log_refused(str(error))
        except (OSError, ClusterError):  # OSError includes TimeoutError
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    def _log_refused(self, reason: str) -> None:
        self._refused += 1
        if (now := time.monotonic()) >= self._logged + REFUSED_LOG_SECONDS:
            log.warning("%s refused", self.name, extra={"count": self._refused, "reason": reason})
            self._refused, self._logged = 0, now


def own_addresses() -> list[str]:
    """Return the IP addresses of this machine's interfaces, without link-local ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    found = {entry.address for entry in entries if entry.family in families}
    return sorted(a for a in found if "%" not in a and not a.startswith("fe80:"))


def reachable_address() -> str:
    """Return the IPv4 address at which other machines reach this one. Raises UsageError without one.

    On a Mac that is an address that its owner gave the Thunderbolt bridge, else the one that its default route uses.
    """
    if (direct := thunderbolt_host()) and not direct.startswith("169.254."):
        return direct
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address of documentation (RFC 5737); no packet is sent
        return str(probe.getsockname()[0])
    found = [a for a in own_addresses() if "." in a and not a.startswith(("127.", "169.254."))]
    if not found:
        raise UsageError("this machine has no address on a network. Connect it, or name one with --listen")
    return found[0]


def thunderbolt_host() -> str:
    """Return the IPv4 address of the Thunderbolt bridge of macOS, or an empty string without one."""
    if sys.platform != "darwin":
        return ""
    found = psutil.net_if_addrs().get("bridge0", [])
    return next((str(one.address) for one in found if one.family == socket.AF_INET), "")


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


async def first_message(requests: AsyncIterator[M]) -> M:
    """Return the first message of a stream. Raises DeadlineError without one, and ProtocolError at the end."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineError(f"the stream sent no message within {FIRST_MESSAGE_SECONDS:g} s") from None
    except StopAsyncIteration:
        raise ProtocolError("the stream ended before its first message") from None
