"""The check of every call to a secured worker: who may call what. A method without a rule is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from proto.errors import AccessError
from proto.rpc import link_test
from proto.rpc.channels import peer_of
from proto.rpc.data_plane import FRAMES, RESULTS
from proto.rpc.status_codes import to_status
from proto.trust.identity import NodeIdentity, Role
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

_CONTROL = "/mtpcluster.v1.Worker/"
_COORDINATOR = frozenset({Role.COORDINATOR})

ALLOWED_ROLES: dict[str, frozenset[Role]] = {
    f"{_CONTROL}Describe": _COORDINATOR,
    f"{_CONTROL}Provide": _COORDINATOR,
    f"{_CONTROL}Load": _COORDINATOR,
    f"{_CONTROL}Connect": _COORDINATOR,
    f"{_CONTROL}ConnectRing": _COORDINATOR,
    f"{_CONTROL}Signals": _COORDINATOR,
    f"{_CONTROL}Unload": _COORDINATOR,
    f"{_CONTROL}ReportState": _COORDINATOR,
    f"{_CONTROL}ReportTrace": _COORDINATOR,
    f"{_CONTROL}ReadBackup": _COORDINATOR,
    f"{_CONTROL}WriteBackup": _COORDINATOR,
    f"{_CONTROL}UpdateTrust": _COORDINATOR,
    RESULTS: _COORDINATOR,
    FRAMES: frozenset({Role.COORDINATOR, Role.WORKER}),
    link_test.REACH: _COORDINATOR,
    link_test.STREAM: frozenset({Role.COORDINATOR, Role.WORKER}),
}
"""The roles that may call each method. For FRAMES the binding also checks that the plan names the sender."""


def check_call(trust: NodeTrust, method: str, peer: NodeIdentity) -> None:
    """Raise AccessError unless `peer` may call `method` on the node with `trust`."""
    trust.check_peer(peer)
    if peer.role not in ALLOWED_ROLES.get(method, frozenset()):
        raise AccessError(f"the role {peer.role} may not call {method.rpartition('/')[2]}")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """The gRPC interceptor that applies `check_call` to every call, and ends the calls of removed nodes."""

    def __init__(self, trust: NodeTrust) -> None:
        self._trust = trust
        self._open: set[tuple[str, asyncio.Task[Any]]] = set()

    def end_calls_of(self, removed: frozenset[str]) -> None:
        """Cancel every open call of a removed node."""
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
        """Return the handler of a call, guarded by the check."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = handler_call_details.method
        guard = self._guarded_stream if handler.response_streaming else self._guarded_call
        kinds = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        name, make = kinds[handler.request_streaming, handler.response_streaming]
        behaviour = guard(method, getattr(handler, name))
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _guarded_call(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            """Make one checked call."""
            async with self._admitted(method, context):
                return await behaviour(request, context)

        return call

    def _guarded_stream(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            """Make one checked call with a stream of replies."""
            async with (
                self._admitted(method, context),
                contextlib.aclosing(behaviour(request, context)) as replies,
            ):
                async for reply in replies:
                    yield reply

        return call

    @contextlib.asynccontextmanager
    async def _admitted(self, method: str, context: Any) -> AsyncIterator[None]:
        """Check the caller, and register its call while the block runs."""
        try:
            peer = peer_of(context)
            check_call(self._trust, method, peer)
        except AccessError as error:
            log.warning("call refused", extra={"method": method, "error": str(error)})
            status = to_status(error)
            await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)
            raise
        task = asyncio.current_task()
        assert task is not None
        entry = (peer.node, task)
        self._open.add(entry)
        try:
            yield
        except asyncio.CancelledError:
            if peer.node in self._trust.removed:  # gRPC sends no status for a cancelled handler
                task.uncancel()
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "removed from the cluster")
            raise
        finally:
            self._open.discard(entry)
