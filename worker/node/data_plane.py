"""The calls that open data connections: they check the caller, and stay open as long as the connection."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from proto.errors import AccessError, ClusterError
from proto.rpc.channels import peer_of
from proto.rpc.data_plane import FRAMES, RESULTS, SERVICE, StreamBinding, ticket_metadata
from proto.rpc.frame_reader import FrameReader
from proto.rpc.frame_writer import FrameWriter
from worker.node.abort import abort
from worker.node.node import WorkerNode

Context = grpc.aio.ServicerContext[Any, Any]


class DataPlane:
    """The two calls that open data connections."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to register with a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                FRAMES.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self.frames),
                RESULTS.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(self.results),
            },
        )

    async def frames(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Receive frames from the previous stage or the coordinator, and tokens from the last stage."""
        try:
            stream = _stream_of(context)
            binding = self.node.binding_of(stream)
            if self.node.identity.trust is not None:
                binding.check_sender(peer_of(context), stream)
            reader = FrameReader(await self._connection(context), binding.receiver_of(stream))
            try:
                await reader.ended
            finally:
                reader.close()
        except ClusterError as error:
            await abort(context, error)
        return
        yield b""  # unreachable. It makes this function the generator that gRPC needs

    async def results(self, _: bytes, context: Context) -> AsyncIterator[bytes]:
        """Send to the coordinator the frames that the last stage has processed, until the plan ends."""
        try:
            binding = self.node.binding_of(_stream_of(context))
            if not binding.place.last:
                raise AccessError(
                    f"stage {binding.place.stage} is not the last stage and has no results"
                )
            writer = binding.results = FrameWriter(
                await self._connection(context),
                "the coordinator",
                binding.hop_timeout,
                binding.ended.put_nowait,
            )
            try:
                raise await binding.ended.get()
            finally:
                writer.close()
        except ClusterError as error:
            await abort(context, error)
        yield b""  # unreachable, as above

    async def _connection(self, context: Context) -> socket.socket:
        """Give the caller a ticket, and return the data connection that it opens."""
        peer = peer_of(context) if self.node.identity.trust is not None else None
        with self.node.tickets.issued(peer) as ticket:
            await context.send_initial_metadata(ticket_metadata(ticket.value))
            return await ticket.wait_for_connection()


def _stream_of(context: Context) -> StreamBinding:
    return StreamBinding.from_metadata(list(context.invocation_metadata() or ()))
