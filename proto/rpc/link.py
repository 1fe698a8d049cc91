"""The outgoing hop: a gRPC call that is open as long as the hop, and the data connection that carries its frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from proto.errors import ClusterError, DeadlineError
from proto.rpc.channels import open_channel
from proto.rpc.data_plane import FRAMES, StreamBinding, ticket_in
from proto.rpc.data_socket import dial
from proto.rpc.frame_writer import FrameWriter
from proto.rpc.hop_probe import HopFigures
from proto.rpc.status_codes import from_status
from proto.trust.identity import Role
from proto.trust.node_trust import NodeTrust

Call = grpc.aio.StreamStreamCall[bytes, bytes]

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
        self._trust = trust
        self._node = node
        # A separate connection for each plan: a new plan must not reuse a connection that has silently died.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = open_channel(address, trust, Role.WORKER, node, options)
        self._writer: FrameWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> HopFigures:
        """Open the call and its data connection, and return the figures of the hop.

        Raises the error that the receiver refuses with, or DeadlineError when it does not answer.
        """
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            FRAMES
        )
        # Kept by no attribute: as long as a call exists, gRPC keeps its connection, although the channel is closed.
        call = method(metadata=self._binding.to_metadata())
        try:
            async with asyncio.timeout(self.timeout):
                metadata = await call.initial_metadata()
        except TimeoutError:
            raise DeadlineError(
                f"opening a stream to {self.address} timed out after {self.timeout:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise await self._failure(call) from error
        if call.done():  # refused: the receiver sent a status instead
            raise await self._failure(call)
        connection, figures = await asyncio.to_thread(
            dial, self.address, self._trust, self._node, ticket_in(metadata), self.timeout
        )
        broken: asyncio.Future[ClusterError] = asyncio.get_running_loop().create_future()
        self._writer = FrameWriter(connection, self.address, self.timeout, broken.set_result)
        self._task = asyncio.create_task(self._watch(call, broken), name=f"link to {self.address}")
        return figures

    def send(
        self, data: bytes, on_written: Callable[[], None], tensor: memoryview | bytes = b""
    ) -> None:
        """Write or queue an encoded frame. Any thread may call it; see FrameWriter."""
        assert self._writer is not None, "the link is open"
        self._writer.send(data, on_written, tensor)

    @property
    def queued(self) -> int:
        """Number of frames that wait to be written."""
        return 0 if self._writer is None else self._writer.queued

    @property
    def stall(self) -> float:
        """Seconds since the current write began; 0 while no write is in progress."""
        return 0.0 if self._writer is None else self._writer.stall

    async def close(self) -> None:
        """End the hop and close its connections."""
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()  # before any wait, which the end of the event loop may cut
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=2 * CLOSE_SECONDS)
            self._task = None  # the traceback of its cancellation refers to the call
        await self._channel.close()

    async def _watch(self, call: Call, broken: asyncio.Future[ClusterError]) -> None:
        """Report the failure of the hop: by the status of the call, or by a write that failed or was late."""
        status = asyncio.create_task(self._failure(call))
        try:
            await asyncio.wait({status, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done() and not isinstance(broken.result(), DeadlineError):
                # A receiver that refuses a frame closes both. Its status says why.
                await asyncio.wait({status}, timeout=CLOSE_SECONDS)
            self._on_failure(status.result() if status.done() else broken.result())
        finally:
            status.cancel()
            await asyncio.wait({status}, timeout=CLOSE_SECONDS)

    async def _failure(self, call: Call) -> ClusterError:
        """Wait for the stream to end, and return the error of its status."""
        code = await call.code()
        return from_status(
            code.name,
            await call.details(),
            await call.trailing_metadata(),
            self.address,
        )
