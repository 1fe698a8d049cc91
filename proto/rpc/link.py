"""The outgoing hop: one long-lived gRPC stream that carries frames to the next stage in order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import grpc
import grpc.aio

from proto.errors import ClusterError, DeadlineError
from proto.rpc.channels import open_channel
from proto.rpc.data_plane import FRAMES, StreamBinding
from proto.rpc.status_codes import from_status
from proto.trust.identity import Role
from proto.trust.node_trust import NodeTrust

SLOWEST_LINK = 4e6
"""Bytes per second of a bad wireless link. It extends the timeout by five seconds for a frame of 20 MB."""

PROBES = 3
"""Round trips that measure a hop. The shortest counts, because other work only makes them longer."""

CLOSE_SECONDS = 1.0
"""Seconds. Maximum wait for the tasks of a link to end."""


class Link:
    """The sender of frames to `address`. It reports failure once, by `on_failure` on the event loop.

    With `trust` the link connects only to the worker with node id `node`.
    """

    def __init__(
        self,
        address: str,
        binding: StreamBinding,
        *,
        timeout: float,
        on_failure: Callable[[ClusterError], None],
        trust: NodeTrust | None = None,
        node: str = "",
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._binding = binding
        self._on_failure = on_failure
        self._queue: asyncio.Queue[tuple[bytes, Callable[[], None]]] = asyncio.Queue()
        self._writing_since: float | None = None
        # A separate connection for each plan: a new plan must not reuse a connection that has silently died.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = open_channel(address, trust, Role.WORKER, node, options)
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> float:
        """Open the stream, wait until the receiver accepts it, and return the measured seconds of one hop.

        Raises the error that the receiver refuses with, or DeadlineError when it does not answer.
        """
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            FRAMES
        )
        self._call = method(metadata=self._binding.to_metadata())
        try:
            async with asyncio.timeout(self.timeout):
                await self._call.initial_metadata()
        except TimeoutError:
            raise DeadlineError(
                f"opening a stream to {self.address} timed out after {self.timeout:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise await self._failure() from error
        if self._call.done():  # refused: the receiver sent a status instead
            raise await self._failure()
        self._task = asyncio.create_task(self._run(), name=f"link to {self.address}")
        return await self._measure_hop(method)

    async def _measure_hop(self, method: grpc.aio.StreamStreamMultiCallable[bytes, bytes]) -> float:
        """Return half of the shortest round trip: that of opening another stream on the warm connection.

        A failure is not an error here, because the status of the link's own stream reports it. The result is then 0.
        """
        shortest = math.inf
        for _ in range(PROBES):
            started = time.monotonic()
            probe = method(metadata=self._binding.to_metadata())
            try:
                async with asyncio.timeout(self.timeout):
                    await probe.initial_metadata()
            except (TimeoutError, grpc.aio.AioRpcError):
                break
            finally:
                probe.cancel()
            shortest = min(shortest, time.monotonic() - started)
        return 0.0 if shortest == math.inf else shortest / 2

    def send(self, data: bytes, on_written: Callable[[], None]) -> None:
        """Queue an encoded frame. `on_written` is called once gRPC has accepted it."""
        self._queue.put_nowait((data, on_written))

    @property
    def queued(self) -> int:
        """Number of frames that wait to be written."""
        return self._queue.qsize()

    @property
    def stall(self) -> float:
        """Seconds since the current write began; 0 while no write is in progress."""
        return 0.0 if self._writing_since is None else time.monotonic() - self._writing_since

    async def close(self) -> None:
        """End the stream and close its connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * CLOSE_SECONDS)
        await self._channel.close()

    async def _run(self) -> None:
        """Write queued frames until the receiver or a deadline ends the stream."""
        writer = asyncio.create_task(self._write())
        status = asyncio.create_task(self._failure())
        try:
            await asyncio.wait({writer, status}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and isinstance(writer.exception(), TimeoutError):
                late = DeadlineError(f"{self.address} accepted no frame for {self.timeout:g} s")
                self._on_failure(late)
            else:
                self._on_failure(await status)
        finally:
            writer.cancel()
            status.cancel()
            # A write to an ended stream also raises, possibly later. The status already gives the cause.
            ended, _ = await asyncio.wait({writer, status}, timeout=CLOSE_SECONDS)
            for task in ended:
                _ = task.cancelled() or task.exception()

    async def _write(self) -> None:
        while True:
            data, on_written = await self._queue.get()
            self._writing_since = time.monotonic()
            deadline = self.timeout + len(data) / SLOWEST_LINK
            # Not wait_for, which loses a cancellation that arrives when the write completes.
            async with asyncio.timeout(deadline):
                await self._call.write(data)
            self._writing_since = None
            on_written()

    async def _failure(self) -> ClusterError:
        """Wait for the stream to end, and return the error of its status."""
        code = await self._call.code()
        return from_status(
            code.name,
            await self._call.details(),
            await self._call.trailing_metadata(),
            self.address,
        )
