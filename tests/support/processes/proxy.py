"""A TCP proxy whose connections can be cut, or frozen like those of a machine that lost its network."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import psutil

from tests.support.processes.processes import Worker

T = TypeVar("T")

START_SECONDS = 60.0
CHUNK = 2**16


@dataclass(eq=False)
class Connection:
    """One incoming connection and the matching connection to the worker."""

    source_port: int
    writers: list[asyncio.StreamWriter]
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def cut(self) -> None:
        """Abort both connections."""
        for writer in self.writers:
            writer.transport.abort()


OWN_HOST = str(ipaddress.ip_address("127.128.0.0") + os.getpid())
"""The proxies' loopback address, which no other process has: a worker's data port is the same behind its proxy."""


class Proxy:
    """A proxy to `target`, a worker, for calls and data connections. Its methods may be called from any thread.

    Faults take `opener`, the process whose connections they affect. None affects all connections.
    """

    def __init__(self, target: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self.address = ""
        self._servers: list[asyncio.Server] = []
        self._loop = loop
        self._connections: set[Connection] = set()
        self._frozen: set[int | None] = set()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self, opener: int | None = None) -> None:
        """End the open connections."""

        async def work() -> None:
            """End them on the proxies' loop."""
            for connection in self._of(opener):
                connection.cut()

        self._do(work())

    def freeze(self, opener: int | None = None) -> None:
        """Block all data on open and future connections, without closing any."""

        async def work() -> None:
            """Block them on the proxies' loop."""
            self._frozen.add(opener)
            for connection in self._of(opener):
                connection.flowing.clear()

        self._do(work())

    def thaw(self) -> None:
        """Deliver all data that `freeze` held back, and stop blocking."""

        async def work() -> None:
            """Unblock them on the proxies' loop."""
            self._frozen.clear()
            for connection in self._connections:
                connection.flowing.set()

        self._do(work())

    def refuse(self, refused: bool = True) -> None:
        """Cut every open and new connection at once. With `refused` False, accept connections again."""

        async def work() -> None:
            """Set the state on the proxies' loop."""
            self._closed = refused
            for connection in self._connections if refused else ():
                connection.cut()

        self._do(work())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    def _of(self, opener: int | None) -> list[Connection]:
        if opener is None:
            return list(self._connections)
        ports = _ports(opener)
        return [c for c in self._connections if c.source_port in ports]

    # ---- on the proxies' loop

    async def start(self) -> None:
        """Listen on the worker's ports at an address of the proxies."""
        host, _, port = self.target.address.rpartition(":")
        for number in (int(port), self.target.data_port):
            accept = partial(self._accept, (host, number))
            self._servers.append(await asyncio.start_server(accept, OWN_HOST, number))
        self.address = f"{OWN_HOST}:{port}"

    async def stop(self) -> None:
        """Close the listeners and all connections."""
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, target: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(target, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, target: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = Connection(writer.get_extra_info("peername")[1], [writer])
        if self._closed:
            connection.cut()
            return
        self._connections.add(connection)
        openers = [o for o in self._frozen if o is None or connection.source_port in _ports(o)]
        if not openers:
            connection.flowing.set()
        try:
            onward, back = await asyncio.open_connection(*target)
            connection.writers.append(back)
            there = asyncio.create_task(_copy(reader, back, connection.flowing))
            here = asyncio.create_task(_copy(onward, writer, connection.flowing))
            await asyncio.wait({there, here}, return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            here.cancel()
            await asyncio.gather(there, here, return_exceptions=True)
        except OSError:
            pass  # the worker is unreachable: end the connection as a direct one would
        finally:
            self._connections.discard(connection)
            connection.cut()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            await flowing.wait()
            writer.write(data)
            await writer.drain()


def _ports(pid: int) -> set[int]:
    """Return the local ports of a process's TCP connections."""
    return {c.laddr.port for c in psutil.Process(pid).net_connections("tcp")}


@contextmanager
def proxies(targets: list[Worker]) -> Iterator[list[Proxy]]:
    """Run one proxy for each worker, on an event loop in a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxies")
    thread.start()
    made = [Proxy(target, loop) for target in targets]

    try:
        for proxy in made:
            proxy._do(proxy.start())
        yield made
    finally:
        for proxy in made:
            proxy._do(proxy.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_SECONDS)
        loop.close()
