"""The guard of every call to a worker: who may call what, how long a request may be, and errors as statuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from proto import cluster_pb2 as pb
from proto.errors import AccessError, ClusterError, ProtocolError
from proto.rpc.channels import peer_of
from proto.rpc.data_connection import FRAMES, RESULTS
from proto.rpc.listener import MAX_CONTROL_BYTES
from proto.rpc.status_codes import to_status
from proto.trust.certificates import Role
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

_COORDINATOR = frozenset({Role.COORDINATOR})
_CONTROL = pb.DESCRIPTOR.services_by_name["Worker"]

ALLOWED_ROLES: dict[str, frozenset[Role]] = {
    **{f"/{_CONTROL.full_name}/{method.name}": _COORDINATOR for method in _CONTROL.methods},
    RESULTS: _COORDINATOR,
    FRAMES: frozenset({Role.COORDINATOR, Role.WORKER}),
}
"""The roles that may call each method; all others are refused. The binding also checks the sender of FRAMES."""


class CallGuard(grpc.aio.ServerInterceptor):
    """The gRPC interceptor of all calls, which ends those that raise a ClusterError, and with `trust` checks peers."""

    def __init__(self, trust: NodeTrust | None) -> None:
        self._trust = trust
        self._open: set[tuple[str, asyncio.Task[Any]]] = set()
        if trust is not None:
            trust.on_removed = self._end_calls_of

    def _end_calls_of(self, removed: frozenset[str]) -> None:
        for node, task in tuple(self._open):
            if node in removed:
                log.warning("call of a removed node ended", extra={"node": node})
                task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the guarded handler of a call."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = handler_call_details.method
        guard = self._guarded_stream if handler.response_streaming else self._guarded_call
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if stream else "unary" for stream in streams)
        behaviour = guard(method, getattr(handler, kind))
        make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _guarded_call(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            async with self._guarded(method, request, context):
                return await behaviour(request, context)

        return call

    def _guarded_stream(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            async with (
                self._guarded(method, request, context),
                contextlib.aclosing(behaviour(request, context)) as replies,
            ):
                async for reply in replies:
                    yield reply

        return call

    @contextlib.asynccontextmanager
    async def _guarded(self, method: str, request: Any, context: Any) -> AsyncIterator[None]:
        """Check a call, and end it with the status of an error that is raised while the block runs."""
        try:
            async with self._admitted(method, context):
                size = request.ByteSize() if isinstance(request, Message) else 0
                if size > MAX_CONTROL_BYTES:
                    raise ProtocolError(
                        f"the call has {size} bytes. The limit of a control message is {MAX_CONTROL_BYTES}"
                    )
                yield
        except ClusterError as error:
            level = logging.WARNING if isinstance(error, AccessError) else logging.INFO
            log.log(level, "call ended", extra={"method": method, "error": str(error)})
            status = to_status(error)
            await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)

    @contextlib.asynccontextmanager
    async def _admitted(self, method: str, context: Any) -> AsyncIterator[None]:
        """Check the caller, and register its call while the block runs."""
        if self._trust is None:
            yield
            return
        peer = peer_of(context)
        self._trust.check_peer(peer)
        if peer.role not in ALLOWED_ROLES.get(method, frozenset()):
            raise AccessError(f"the role {peer.role} may not call {method.rpartition('/')[2]}")
        task = asyncio.current_task()
        assert task is not None
        entry = (peer.node, task)
        self._open.add(entry)
        try:
            yield
        except asyncio.CancelledError:
            if peer.node in self._trust.removed:  # gRPC sends no status for a cancelled handler
                task.uncancel()
                raise AccessError("removed from the cluster") from None
            raise
        finally:
            self._open.discard(entry)
