"""A tap on a worker's address: passes every gRPC call on, whatever it is, and keeps what went each way.

Put in front of each worker, it sees all that crosses the network: control calls, signals, and every hop's frames.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from proto.rpc.data_plane import CHANNEL_OPTIONS

START_SECONDS = 60.0


@dataclass(frozen=True)
class Message:
    """One message of a call to `worker`, by its place in the chain; `inward` when the worker received it."""

    worker: int
    method: str
    inward: bool
    data: bytes


@dataclass
class Tap:
    """`address` stands for the worker's own. `messages` of several taps share one list, in the order of arrival."""

    worker: int
    target: str
    messages: list[Message]
    address: str = ""
    _server: Any = field(default=None, repr=False)

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.target, options=CHANNEL_OPTIONS)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((_Every(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def forward(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """One call, of whatever kind: each is a stream of messages both ways, ended by a status."""

        async def noted() -> AsyncIterator[bytes]:
            async for data in requests:
                self.messages.append(Message(self.worker, method, True, data))
                yield data

        metadata = [(k, v) for k, v in context.invocation_metadata() if k.startswith("mtp-")]
        multi: Any = self._channel.stream_stream(method)
        call = multi(noted(), metadata=metadata)
        try:
            await context.send_initial_metadata(await call.initial_metadata())
            async for data in call:
                self.messages.append(Message(self.worker, method, False, data))
                yield data
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata())
            await context.abort(error.code(), error.details() or "", trailing)
        finally:
            call.cancel()


class _Every(grpc.GenericRpcHandler):
    """Answers for every method there may be."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for data in self._tap.forward(method, requests, context):
                yield data

        return grpc.stream_stream_rpc_method_handler(forward)


@contextmanager
def tapped(addresses: Sequence[str]) -> Iterator[list[Tap]]:
    """Taps in front of these workers, on an event loop in a thread of their own."""
    messages: list[Message] = []
    taps = [Tap(i, address, messages) for i, address in enumerate(addresses)]
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
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
