"""The gRPC services of a worker: protobuf calls become calls on the node, which `CallGuard` guards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
import mlx.core as mx
from google.protobuf.message import Message

from mtp.device import Arithmetic
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.backup import PieceJoiner, split
from proto.control import check_signal, check_version
from proto.errors import (
    AccessError,
    BusyError,
    ClusterError,
    NotReadyError,
    ProtocolError,
    StaleEpochError,
    VersionError,
)
from proto.frame import VERSION
from proto.rpc.channels import CHANNEL_OPTIONS, FIRST_MESSAGE_SECONDS, peer_of
from proto.rpc.data_connection import FRAMES, RESULTS, SERVICE, StreamBinding
from proto.rpc.link import FrameReader, FrameWriter
from proto.rpc.listener import MAX_CONTROL_BYTES, MAX_TRANSFERS, first_message
from proto.rpc.status_codes import printable, to_status
from proto.span import Span
from proto.trust.certificates import Role
from proto.trust.node_trust import NodeTrust
from worker.engine import hardware
from worker.engine.frame_engine import FrameEngine
from worker.engine.prefix_disk import StagePrefixes, layer_bytes
from worker.engine.stage_backups import ReceivedBackup, layer_states
from worker.fetch.fill import provide
from worker.node.node import Lease, WorkerNode

log = logging.getLogger(__name__)


class CallGuard(grpc.aio.ServerInterceptor):
    """The interceptor of all calls: their bounds, errors as statuses, and with `trust` the roles that may call."""

    def __init__(self, trust: NodeTrust | None) -> None:
        self._trust = trust
        self._open: set[tuple[str, asyncio.Task[Any]]] = set()
        self._last_error = ("", "")
        if trust is not None:
            trust.on_removed = self._end_calls_of

    def _end_calls_of(self, removed: frozenset[str]) -> None:
        for node, task in tuple(self._open):
            if node in removed:
                log.warning("call of a removed node ended", extra={"node": node})
                task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
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
        """Check a call, and end it with the status of an error that the block raises."""
        try:
            async with self._admitted(method, context):
                size = request.ByteSize() if isinstance(request, Message) else 0
                if size > MAX_CONTROL_BYTES:
                    raise ProtocolError(
                        f"the call has {size} bytes. The limit of a control message is {MAX_CONTROL_BYTES}"
                    )
                yield
        except ClusterError as error:
            level = logging.WARNING if isinstance(error, AccessError | VersionError) else logging.INFO
            again = self._last_error == (method, str(error))  # as of a coordinator that asks every second
            log.log(logging.DEBUG if again else level, "call ended", extra={"method": method, "error": str(error)})
            self._last_error = method, str(error)
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
        # The binding also checks the sender of frames.
        if peer.role is not Role.COORDINATOR and method != FRAMES:
            raise AccessError(f"the role {peer.role} may not call {method.rpartition('/')[2]}")
        task = asyncio.current_task()
        assert task is not None
        self._open.add((peer.node, task))
        try:
            yield
        except asyncio.CancelledError:
            if peer.node in self._trust.removed:  # gRPC sends no status for a cancelled handler
                task.uncancel()
                raise AccessError("removed from the cluster") from None
            raise
        finally:
            self._open.discard((peer.node, task))


Context = grpc.aio.ServicerContext[Any, Any]

METADATA_SECONDS = 1.0
"""Seconds that a cancelled call waits for its metadata to be sent."""

MAX_REFUSAL = 400
"""Characters of a coordinator's reason in the log."""

REPEAT_SECONDS = 20.0
"""Seconds without progress after which the newest message is sent again. A coordinator ends a load that says nothing
for two minutes, and compiling kernels takes up to one."""

STOP_SECONDS = 1.0
"""Seconds. Maximum time that open calls may take to end when the server stops."""

KEEPALIVE_SECONDS = 60.0
"""Seconds. Silence of a connection after which the worker pings it: a machine that loses its power closes none."""

KEEPALIVE_REPLY_SECONDS = 20.0
"""Seconds. Maximum time until the reply to that ping."""


async def repeat_progress(progress: asyncio.Queue[pb.LoadProgress]) -> AsyncIterator[pb.LoadProgress]:
    """Yield the messages up to an empty one. Repeat the newest after `REPEAT_SECONDS` without another."""
    newest = pb.LoadProgress(progress=pb.LoadBytes())
    while True:
        with contextlib.suppress(TimeoutError):
            newest = await asyncio.wait_for(progress.get(), REPEAT_SECONDS)
        if not newest.WhichOneof("body"):
            return
        yield newest


class DataPlane:
    """The two calls that open data connections."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of both calls, to register with a server."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            FRAMES.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self.frames),
            RESULTS.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(self.results),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def frames(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Receive frames from the previous stage or the coordinator, and tokens from the last stage."""
        stream = _stream_of(context)
        binding = self.node.binding_of(stream)
        if self.node.identity.trust is not None:
            binding.check_sender(peer_of(context), stream)
        reader = FrameReader(await self._connection(context), binding.receiver_of(stream))
        try:
            if error := await reader.ended:
                raise error
        finally:
            reader.close()
        return
        yield b""  # unreachable. It makes this function the generator that gRPC needs

    async def results(self, _: bytes, context: Context) -> AsyncIterator[bytes]:
        """Send to the coordinator the frames that the last stage has processed, until the plan ends."""
        binding = self.node.binding_of(_stream_of(context))
        if not binding.place.last:
            raise AccessError(f"stage {binding.place.stage} is not the last and has no results")
        connection, on_end = await self._connection(context), binding.ended.put_nowait
        writer = FrameWriter(connection, "the coordinator", binding.hop_timeout, on_end)
        binding.results = writer
        try:
            raise await binding.ended.get()
        finally:
            writer.close()
        yield b""  # unreachable, as above

    async def _connection(self, context: Context) -> socket.socket:
        """Give the caller a ticket, and return the data connection that it opens."""
        peer = peer_of(context) if self.node.identity.trust is not None else None
        with self.node.tickets.issued(peer) as ticket:
            sending = asyncio.ensure_future(context.send_initial_metadata(ticket.offer.to_metadata()))
            try:
                await asyncio.shield(sending)
            except asyncio.CancelledError:
                # gRPC can end no call whose metadata is half sent, and its client would wait.
                await asyncio.wait({sending}, timeout=METADATA_SECONDS)
                raise
            return await ticket.wait_for_connection()


def _stream_of(context: Context) -> StreamBinding:
    return StreamBinding.from_metadata(list(context.invocation_metadata() or ()))


class WorkerService(pb_grpc.WorkerServicer):
    """The control calls, as proto/cluster.proto describes them."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node
        self._transfers = 0
        """Provide calls in progress."""
        self._refusals = deque[str](maxlen=8)
        """The newest reasons why coordinators do not use this worker. They repeat them every second."""

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.WorkerInfo:
        check_version(request.protocol_version)
        node, identity = self.node, self.node.identity
        node.release_lapsed()
        refusal = printable(request.refusal, MAX_REFUSAL)
        if refusal and refusal not in self._refusals:
            self._refusals.append(refusal)
            log.warning("a coordinator does not use this worker", extra={"reason": refusal})
        info = pb.WorkerInfo(
            protocol_version=VERSION,
            worker_id=identity.id,
            name=identity.name,
            hardware=pb.Hardware(
                chip=hardware.chip(),
                memory_limit=identity.memory_limit,
                bytes_per_second=identity.bytes_per_second,
                arithmetic=str(Arithmetic.here()),
            ),
            model=identity.models.own.name if identity.models.own else "",
            state=node.state,
            node_id=identity.trust.identity.node if identity.trust else "",
            version=hardware.own_version(),
            direct=identity.direct,
        )
        if identity.pinned is not None:
            info.pinned.CopyFrom(pb.Span(start=identity.pinned.start, end=identity.pinned.end))
        if request.HasField("model"):
            fingerprint_of = identity.models.fingerprint_of
            info.fingerprint = await asyncio.to_thread(fingerprint_of, request.model)
            if node.host.disk is not None:
                for layers, nbytes in await asyncio.to_thread(layer_bytes, node.host.disk, request.model.fingerprint):
                    info.blocks.add(layers=pb.Span(start=layers.start, end=layers.end), bytes=nbytes)
        if node.lease is not None:
            info.leased_to.CopyFrom(pb.Coordinator(id=node.lease.id, name=node.lease.name))
        return info

    async def StartMember(self, request: pb.MemberRequest, context: Context) -> pb.MemberReply:
        return await self.node.start_member(request)

    async def Load(self, request: pb.LoadRequest, context: Context) -> AsyncIterator[pb.LoadProgress]:
        progress: asyncio.Queue[pb.LoadProgress] = asyncio.Queue()

        def on_progress(done: int, total: int) -> None:
            progress.put_nowait(pb.LoadProgress(progress=pb.LoadBytes(done=done, total=total)))

        task = asyncio.create_task(self.node.load(request, on_progress))
        task.add_done_callback(lambda _: progress.put_nowait(pb.LoadProgress()))
        try:
            async for message in repeat_progress(progress):
                yield message
            yield pb.LoadProgress(result=await task)
        finally:
            task.cancel()

    async def Provide(self, requests: AsyncIterator[pb.Weights], context: Context) -> AsyncIterator[pb.WeightsReply]:
        self._transfers += 1
        try:
            if self._transfers > MAX_TRANSFERS:
                raise BusyError(f"worker {self.node.identity.name} receives weights already")
            async with contextlib.aclosing(provide(requests, self.node.renew_lease)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self._transfers -= 1

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectReply:
        return await self.node.connect(request)

    async def ConnectRing(self, request: pb.RingRequest, context: Context) -> pb.ConnectReply:
        return await self.node.connect_ring(request)

    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadReply:
        self.node.unload(request)
        return pb.UnloadReply()

    async def UpdateTrust(self, request: pb.TrustUpdate, context: Context) -> pb.TrustReply:
        trust = self.node.identity.trust
        if trust is None:
            raise AccessError("this worker belongs to no cluster")
        trust.install(request.authorities, frozenset(request.removed_nodes), request.certificate)
        trust.save_server(request.url, request.api_key)
        return pb.TrustReply(signing_request=trust.due_request())

    async def ReadBackup(self, request: pb.BackupRequest, context: Context) -> AsyncIterator[pb.BackupPiece]:
        engine = self._engine(request.coordinator, request.epoch)
        thread = self.node.host.thread
        # The engine thread makes and drops backups, so it also takes this one. Chunks of a prompt that are queued would
        # take seconds, and a failure meanwhile loses it.
        backup, states = await thread.call(partial(engine.backups.begin_reading, request.seq_id), urgent=True)
        head, index = pb.BackupHead(seq_id=backup.seq_id, length=backup.length), len(states)
        # A head follows each wait for the engine, so that the coordinator does not count it as transfer.
        yield pb.BackupPiece(head=head)
        for piece in split(states):
            yield piece
        while index < len(backup.layers):
            # Between two calls the engine thread may run frames.
            states = await thread.call(partial(layer_states, backup, index), urgent=True)
            index += len(states)
            yield pb.BackupPiece(head=head)
            for piece in split(states):
                yield piece

    async def WriteBackup(self, requests: AsyncIterator[pb.BackupPiece], context: Context) -> pb.BackupReply:
        head = (await first_message(requests)).head
        engine = self._engine(head.coordinator, head.epoch)
        joiner = PieceJoiner(self.node.identity.memory_limit)
        async for piece in requests:
            joiner.add_piece(piece)
        if len(head.tokens) != head.length:
            raise ProtocolError(f"a backup of {head.length} tokens has {len(head.tokens)} of them")
        received = ReceivedBackup.of(head.tokens, joiner.states, from_disk=head.from_disk)
        for part in received.in_parts():
            await self.node.host.thread.call(partial(engine.receive_backup, head.seq_id, part))
        return pb.BackupReply()

    async def FindPrefix(self, requests: AsyncIterator[pb.PrefixRequest], context: Context) -> pb.PrefixReply:
        _, disk, _, tokens = await self._prefix_call(requests)
        return await disk.find(tokens)

    async def LoadPrefix(self, requests: AsyncIterator[pb.PrefixRequest], context: Context) -> pb.PrefixReply:
        engine, disk, seq_id, tokens = await self._prefix_call(requests)
        async for part in disk.load(tokens, engine.backups.layers_of(seq_id, tokens)):
            await self.node.host.thread.call(partial(engine.receive_backup, seq_id, part))
        return pb.PrefixReply()

    async def _prefix_call(
        self, requests: AsyncIterator[pb.PrefixRequest]
    ) -> tuple[FrameEngine, StagePrefixes, int, list[int]]:
        """Return the engine, its disk, and the sequence and tokens of a call, or raise NotReadyError, ProtocolError."""
        first = await first_message(requests)
        engine, disk = self._disk(first.coordinator, first.epoch)
        tokens, longest = list(first.tokens), engine.stage.modules.config.max_positions
        async for request in requests:
            tokens += request.tokens
            if len(tokens) > longest:
                raise ProtocolError(f"{len(tokens)} tokens of a context of {longest}")
        return engine, disk, first.seq_id, tokens

    async def ReadBlocks(self, request: pb.BlockRequest, context: Context) -> AsyncIterator[pb.BackupPiece]:
        _, disk = self._disk(request.coordinator, request.epoch)
        async for states in disk.read_states(request.key, Span(request.layers.start, request.layers.end)):
            for piece in split(states, checked=True):
                yield piece

    def _disk(self, coordinator: pb.Coordinator, epoch: int) -> tuple[FrameEngine, StagePrefixes]:
        engine = self._engine(coordinator, epoch)
        if engine.disk is None:
            raise NotReadyError("this worker keeps no prefixes on disk")
        return engine, engine.disk

    def _engine(self, coordinator: pb.Coordinator, epoch: int) -> FrameEngine:
        self.node.renew_lease(coordinator)
        binding = self.node.binding
        if binding is None or binding.place.epoch != epoch or binding.engine is None:
            raise StaleEpochError(f"no plan of epoch {epoch} is bound here")
        return binding.engine

    async def ReportState(self, request: pb.StateReportRequest, context: Context) -> pb.StateReport:
        engine = self.node.binding.engine if self.node.binding is not None else None
        if engine is None:
            return pb.StateReport(epoch=self.node.epoch)
        return await self.node.host.thread.call(engine.report_state)

    async def ReportTrace(self, request: pb.TraceRequest, context: Context) -> pb.TraceReport:
        report = pb.TraceReport(now_ns=time.monotonic_ns())
        for s in self.node.host.stamps.since(request.since_ns) if request.with_frames else []:
            report.frames.add(epoch=s.epoch, number=s.number, rows=s.rows, times_ns=s.times)
        return report

    async def Signals(self, requests: AsyncIterator[pb.Signal], context: Context) -> AsyncIterator[pb.WorkerStatus]:
        first = await first_message(requests)
        check_signal(first)
        if not first.HasField("hello"):
            raise ProtocolError("the first signal is not a hello")
        lease = self.node.renew_lease(first.hello.coordinator)
        lease.streams += 1
        reader = asyncio.create_task(self._read_signals(requests, lease))
        try:
            while not reader.done():
                yield self._worker_status()
                await self._wait_for_change(reader, first.hello.status_interval_ms / 1000)
                self._check_lease(lease)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await reader
        finally:
            reader.cancel()
            lease.streams -= 1
            # The coordinator has gone, so its requests need no state any more.
            if self.node.lease is lease and not lease.streams:
                self.node.release()

    async def _wait_for_change(self, reader: asyncio.Task[None], seconds: float) -> None:
        change = asyncio.create_task(self.node.state_changed.wait())
        try:
            await asyncio.wait({reader, change}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:  # the task must not outlive the call
            change.cancel()
        self.node.state_changed.clear()

    def _check_lease(self, lease: Lease) -> None:
        """Raise NotReadyError when the lease of a stream has ended, although its coordinator may be alive."""
        self.node.release_lapsed()
        if self.node.lease is not lease:
            raise NotReadyError(f"worker {self.node.identity.name} no longer serves {lease.name}")

    async def _read_signals(self, requests: AsyncIterator[pb.Signal], lease: Lease) -> None:
        async for signal in requests:
            check_signal(signal)
            self._check_lease(lease)
            lease.renew()
            self.node.apply_signal(signal)

    def _worker_status(self) -> pb.WorkerStatus:
        node, thread, traffic = self.node, self.node.host.thread, self.node.traffic
        binding = node.binding
        engine = None if binding is None else binding.engine
        thread.wait_for_compiler()
        return pb.WorkerStatus(
            state=node.state,
            epoch=binding.place.epoch if binding and binding.bound else 0,
            frames_done=engine.frames_done if engine else 0,
            engine_stall_ms=int(thread.stall * 1000),
            link_stall_ms=int(binding.link_stall * 1000) if binding else 0,
            busy_us=thread.busy_us,
            memory_used=mx.get_active_memory(),
            memory_cached=mx.get_cache_memory(),
            bytes_in=traffic.received.nbytes,
            bytes_out=traffic.sent.nbytes,
            fault=binding.fault if binding else None,
            awaits_tokens=binding is not None and binding.awaits_tokens,
        )


def make_server(node: WorkerNode) -> grpc.aio.Server:
    """Return a server with both planes, without a port."""
    server = grpc.aio.server(
        options=(
            *CHANNEL_OPTIONS,
            # These close the connections of machines that have vanished, also those without a call.
            ("grpc.server_handshake_timeout_ms", round(1e3 * FIRST_MESSAGE_SECONDS)),
            ("grpc.keepalive_time_ms", round(1e3 * KEEPALIVE_SECONDS)),
            ("grpc.keepalive_timeout_ms", round(1e3 * KEEPALIVE_REPLY_SECONDS)),
            # The keepalive timeout acts through an option of TCP that macOS lacks.
            ("grpc.http2.ping_timeout_ms", round(1e3 * KEEPALIVE_REPLY_SECONDS)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.so_reuseport", 0),
        ),
        maximum_concurrent_rpcs=64,
        interceptors=[CallGuard(node.identity.trust)],
    )
    pb_grpc.add_WorkerServicer_to_server(WorkerService(node), server)
    server.add_generic_rpc_handlers((DataPlane(node).handler(),))
    return server
