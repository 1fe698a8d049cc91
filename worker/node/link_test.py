"""The worker's side of link measurements: answers to a test stream, and measurements of links to other workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from proto.errors import ClusterError, ProtocolError
from proto.rpc.channels import open_channel
from proto.rpc.link_test import REACH, SERVICE, STREAM, acknowledge, measure_link
from proto.rpc.status_codes import from_status, to_status
from proto.trust.identity import Role
from proto.trust.node_trust import NodeTrust

Context = grpc.aio.ServicerContext[bytes, bytes]


class LinkTestService:
    """The two methods of the link test. With `trust` links are measured over TLS, as plans use them."""

    def __init__(self, trust: NodeTrust | None) -> None:
        self._trust = trust

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to register with a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                STREAM.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self.stream),
                REACH.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(self.reach),
            },
        )

    async def stream(
        self, messages: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Answer each message with this machine's clock."""
        async for reply in acknowledge(messages):
            yield reply

    async def reach(self, request: bytes, context: Context) -> bytes:
        """Measure the link to another worker, as this worker would open a hop to it."""
        try:
            address, node = _target(request)
            return await self._measure(address, node)
        except ClusterError as error:
            status = to_status(error)
            metadata: Any = status.metadata
            await context.abort(getattr(grpc.StatusCode, status.code), status.details, metadata)
            raise  # unreachable: abort raises

    async def _measure(self, address: str, node: str) -> bytes:
        channel = open_channel(address, self._trust, Role.WORKER, node)
        try:
            return (await measure_link(channel)).encode()
        except grpc.aio.AioRpcError as error:
            metadata: Any = error.trailing_metadata()
            raise from_status(error.code().name, error.details(), metadata, address) from error
        finally:
            await channel.close()


def _target(request: bytes) -> tuple[str, str]:
    """Return address and node id of a request. Raises ProtocolError for a malformed one."""
    try:
        found = json.loads(request)
        return str(found["address"]), str(found["node"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"the request of a link test is malformed: {error}") from error
