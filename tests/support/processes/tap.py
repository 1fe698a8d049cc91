"""A proxy that records every message in both directions, on gRPC calls and on data connections.

A tap in front of each worker records everything that crosses the network: control calls, signals and the frames of
every hop.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from proto.rpc.channels import CHANNEL_OPTIONS
from proto.rpc.data_connection import FRAMES, PREAMBLE, RESULTS, ROUND_TRIPS, DataPort, TicketOffer
from proto.rpc.link import LENGTH
from proto.rpc.listener import BackgroundTasks, bind_listener

START_SECONDS = 60.0


@dataclass(frozen=True)
class Message:
    """One message of a call to worker number `worker` of the chain. `inward` is True if the worker received it."""

    worker: int
    method: str
    inward: bool
    data: bytes


@dataclass
class Tap:
    """A tap that listens at `address` for the worker at `target`.

    Several taps share one list `messages`, in the order of arrival.
    """

    worker: int
    target: str
    messages: list[Message]
    address: str = ""
    _server: Any = field(default=None, repr=False)
    _offers: dict[bytes, tuple[str, TicketOffer]] = field(default_factory=dict, repr=False)
    """The methods and the worker's offers of the calls that wait for their data connections, by ticket."""
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks, repr=False)

    async def start(self) -> None:
        """Connect to the worker and listen on a free port."""
        self._channel = grpc.aio.insecure_channel(self.target, options=CHANNEL_OPTIONS)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((_Every(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._port = DataPort(bind_listener("tap", "127.0.0.1", 0), self._accept_data)
        self._port.start()

    async def stop(self) -> None:
        """Close the server and the connections to the worker."""
        await self._server.stop(0)
        await self._port.close()
        await self._tasks.close()
        await self._channel.close()

    def _accept_data(self, ticket: bytes, connection: socket.socket) -> None:
        self._tasks.spawn(self._forward_data(ticket, connection))

    async def _forward_data(self, ticket: bytes, connection: socket.socket) -> None:
        """Forward a data connection. Frames travel in one direction, which the method of its call decides."""
        method, offer = self._offers.pop(ticket)
        host = self.target.rpartition(":")[0]
        client, to_client = await asyncio.open_connection(sock=connection)
        worker, to_worker = await asyncio.open_connection(host, offer.port)
        to_worker.write(PREAMBLE + ticket)
        try:
            for _ in range(ROUND_TRIPS):
                to_worker.write(await client.readexactly(1))
                to_client.write(await worker.readexactly(1))
            while nbytes := LENGTH.unpack(await copy_bytes(client, to_worker, LENGTH.size))[0]:
                await copy_bytes(client, to_worker, nbytes)
                await copy_bytes(worker, to_client, 1)
            inward = method == FRAMES
            source, target = (client, to_worker) if inward else (worker, to_client)
            while True:
                head = await source.readexactly(LENGTH.size)
                data = await source.readexactly(LENGTH.unpack(head)[0])
                self.messages.append(Message(self.worker, method, inward, data))
                target.write(head + data)
                await target.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of them has closed
        finally:
            to_client.close()
            to_worker.close()

    async def forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Forward one call of any kind. Each kind is a stream of messages both ways, ended by a status."""

        async def noted() -> AsyncIterator[bytes]:
            """Yield the requests and record each."""
            async for data in requests:
                self.messages.append(Message(self.worker, method, True, data))
                yield data

        metadata = [(k, v) for k, v in context.invocation_metadata() if k.startswith("mtp-")]
        multi: Any = self._channel.stream_stream(method)
        call = multi(noted(), metadata=metadata)
        try:
            initial: Any = await call.initial_metadata()
            if method in (FRAMES, RESULTS) and not call.done():
                offer = TicketOffer.from_metadata(initial)
                self._offers[offer.ticket] = method, offer
                initial = TicketOffer(offer.ticket, self._port.port).to_metadata()
            await context.send_initial_metadata(initial)
            async for data in call:
                self.messages.append(Message(self.worker, method, False, data))
                yield data
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata())
            await context.abort(error.code(), error.details() or "", trailing)
        finally:
            call.cancel()


class _Every(grpc.GenericRpcHandler):
    """A handler for every method."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of one method."""
        method = str(details.method)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            """Forward a call of this method."""
            async for data in self._tap.forward(method, requests, context):
                yield data

        return grpc.stream_stream_rpc_method_handler(forward)


@contextmanager
def tapped(addresses: Sequence[str]) -> Iterator[list[Tap]]:
    """Run taps in front of these workers, on an event loop in a separate thread."""
    messages: list[Message] = []
    taps = [Tap(i, address, messages) for i, address in enumerate(addresses)]
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
        """Serve until the block exits."""
        for tap in taps:
            await tap.start()
        ready.set()
        await asyncio.to_thread(over.wait)
        for tap in taps:
            await tap.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="taps")
    thread.start()
    try:
        assert ready.wait(START_SECONDS), "the taps did not start"
        yield taps
    finally:
        over.set()
        thread.join(START_SECONDS)


async def copy_bytes(source: asyncio.StreamReader, target: asyncio.StreamWriter, count: int) -> bytes:
    """Forward `count` bytes of a burst that measures the hop, and return them."""
    data = await source.readexactly(count)
    target.write(data)
    await target.drain()
    return data
