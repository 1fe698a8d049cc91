"""The outgoing hop: one long-lived gRPC stream to the next stage, frames in order, each with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import grpc.aio

from proto.errors import ClusterError, DeadlineError
from proto.rpc.data_plane import CHANNEL_OPTIONS, FRAMES, StreamBinding
from proto.rpc.status_codes import from_status

SLOWEST_LINK = 4e6
"""Bytes a second of a bad wireless link: a prompt's frame of 20 MB gets five seconds more than the timeout."""

CLOSE_SECONDS = 1.0
"""Longest wait for what a link has under way, once it is told to end."""


class Link:
    """Sends frames to `address`. Failure is told once, to `on_failure`, on the event loop."""

    def __init__(
        self,
        address: str,
        binding: StreamBinding,
        *,
        timeout: float,
        on_failure: Callable[[ClusterError], None],
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.bytes_sent = 0
        self.messages_sent = 0
        self._binding = binding
        self._on_failure = on_failure
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._writing_since: float | None = None
        # A connection of its own: one that has died unnoticed must not be taken up again by the next plan.
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> float:
        """Open the stream and wait until the far end accepts it. Returns that round trip in seconds.

        Raises what the far end's refusal stands for, DeadlineError when it does not answer.
        """
        started = time.monotonic()
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            FRAMES
        )
        self._call = method(metadata=self._binding.to_metadata())
        try:
            async with asyncio.timeout(self.timeout):
                await self._call.initial_metadata()
        except TimeoutError:
            raise DeadlineError(
                f"{self.address} did not accept the stream in {self.timeout:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise await self._failure() from error
        if self._call.done():  # refused: a status came instead of acceptance
            raise await self._failure()
        self._task = asyncio.create_task(self._run(), name=f"link to {self.address}")
        return time.monotonic() - started

    def send(self, data: bytes) -> None:
        self._queue.put_nowait(data)

    @property
    def queued(self) -> int:
        return self._queue.qsize()

    @property
    def stall(self) -> float:
        """Seconds the far end has not taken what is being written; 0 while nothing is."""
        return 0.0 if self._writing_since is None else time.monotonic() - self._writing_since

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * CLOSE_SECONDS)
        await self._channel.close()

    async def _run(self) -> None:
        """Write what is queued until the far end or a deadline ends it."""
        writer = asyncio.create_task(self._write())
        status = asyncio.create_task(self._failure())
        try:
            await asyncio.wait({writer, status}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and isinstance(writer.exception(), TimeoutError):
                late = DeadlineError(f"{self.address} took no frame for {self.timeout:g} s")
                self._on_failure(late)
            else:
                self._on_failure(await status)
        finally:
            writer.cancel()
            status.cancel()
            # A write to a stream that is over raises too, maybe later; the status has said why.
            ended, _ = await asyncio.wait({writer, status}, timeout=CLOSE_SECONDS)
            for task in ended:
                _ = task.cancelled() or task.exception()

    async def _write(self) -> None:
        while True:
            data = await self._queue.get()
            self._writing_since = time.monotonic()
            deadline = self.timeout + len(data) / SLOWEST_LINK
            # Not wait_for: that lets a cancellation pass unheeded when the write ends just then.
            async with asyncio.timeout(deadline):
                await self._call.write(data)
            self._writing_since = None
            self.bytes_sent += len(data)
            self.messages_sent += 1

    async def _failure(self) -> ClusterError:
        """Waits for the stream to end, and says why it did."""
        code = await self._call.code()
        return from_status(
            code.name,
            await self._call.details(),
            await self._call.trailing_metadata(),
            self.address,
        )
