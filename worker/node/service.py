"""The gRPC service of a worker: protobuf calls and raw frame streams become calls on the node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio

from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.control import Hello, check_version, from_message
from proto.errors import AccessError, BusyError, ClusterError, NotReadyError, ProtocolError
from proto.frame import VERSION
from proto.rpc.call_bounds import MAX_TRANSFERS, check_size, first_message
from proto.rpc.data_plane import (
    CHANNEL_OPTIONS,
)
from proto.span import Span
from worker.engine import hardware, sensors
from worker.fetch.provide import provide
from worker.node.abort import abort
from worker.node.access import AccessInterceptor
from worker.node.backups import read_backup, write_backup
from worker.node.data_plane import DataPlane
from worker.node.lease import Lease
from worker.node.link_test import LinkTestService
from worker.node.load_progress import repeat_progress
from worker.node.node import WorkerNode

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

STOP_SECONDS = 1.0
"""Seconds. Maximum time that open calls may take to end when the server stops."""

KEEPALIVE_SECONDS = 60.0
"""Seconds. Silence of a connection after which the worker pings it. gRPC would ping after two hours, or never.

A machine that loses its power closes no connection. Its connections would fill the descriptors of the worker.
"""

KEEPALIVE_REPLY_SECONDS = 20.0
"""Seconds. Maximum time until the reply to that ping. Then the connection is closed."""


class WorkerService(pb_grpc.WorkerServicer):
    """The control calls. Every ClusterError becomes its gRPC status."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node
        self._checked_pins: set[str] = set()
        """Fingerprints of the models that the pinned layers were checked against."""
        self._transfers = 0
        """Provide calls in progress."""

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.WorkerInfo:
        """See proto/cluster.proto, as for every call of this class."""
        return await _answer(context, self._describe(request))

    async def _describe(self, request: pb.DescribeRequest) -> pb.WorkerInfo:
        check_size(request)
        check_version(request.protocol_version)
        node, identity = self.node, self.node.identity
        node.release_lapsed()
        info = pb.WorkerInfo(
            protocol_version=VERSION,
            worker_id=identity.id,
            name=identity.name,
            hardware=hardware.describe(identity.memory_limit, identity.bytes_per_second),
            model=identity.models.own.name if identity.models.own else "",
            state=node.state,
            node_id=identity.trust.identity.node if identity.trust else "",
            version=sensors.own_version(),
        )
        if identity.pinned is not None:
            info.pinned.CopyFrom(pb.Span(start=identity.pinned.start, end=identity.pinned.end))
        if request.HasField("model"):
            info.fingerprint = await asyncio.to_thread(
                identity.models.fingerprint_of, request.model
            )
            if identity.pinned is not None and info.fingerprint not in self._checked_pins:
                self._checked_pins.add(info.fingerprint)
                self._check_pins(request.model, identity.pinned, info.fingerprint)
        if node.lease is not None:
            info.leased_to.CopyFrom(pb.Coordinator(id=node.lease.id, name=node.lease.name))
        return info

    def _check_pins(self, wanted: pb.ModelRef, pinned: Span, fingerprint: str) -> None:
        """Warn of pinned layers that the coordinator's model does not have, because it refuses this worker."""
        if not fingerprint:
            return
        layers = self.node.identity.models.find_whole(wanted).config.num_layers
        if pinned.end > layers:
            log.warning(
                "the pinned layers are outside the coordinator's model: restart this worker with other --layers",
                extra={
                    "layers": str(pinned),
                    "model": wanted.name,
                    "model_layers": f"0-{layers - 1}",
                },
            )

    async def Load(
        self, request: pb.LoadRequest, context: Context
    ) -> AsyncIterator[pb.LoadProgress]:
        """Yield the progress, then the result."""
        progress: asyncio.Queue[pb.LoadProgress] = asyncio.Queue()

        def on_progress(done: int, total: int) -> None:
            """Queue a progress message."""
            progress.put_nowait(pb.LoadProgress(progress=pb.LoadBytes(done=done, total=total)))

        task = asyncio.create_task(self.node.load(request, on_progress))
        task.add_done_callback(lambda _: progress.put_nowait(pb.LoadProgress()))
        try:
            async for message in repeat_progress(progress):
                yield message
            yield pb.LoadProgress(result=await task)
        except ClusterError as error:
            await abort(context, error)
        finally:
            task.cancel()

    async def Provide(
        self, requests: AsyncIterator[pb.Weights], context: Context
    ) -> AsyncIterator[pb.WeightsReply]:
        """Yield the requests for missing tensors and the progress."""
        self._transfers += 1
        try:
            if self._transfers > MAX_TRANSFERS:
                raise BusyError(f"worker {self.node.identity.name} receives weights already")
            async with contextlib.aclosing(provide(requests, self.node.renew_lease)) as replies:
                async for reply in replies:
                    yield reply
        except ClusterError as error:
            await abort(context, error)
        finally:
            self._transfers -= 1

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectReply:
        """Bind the stage into a plan."""

        async def connect() -> pb.ConnectReply:
            """Bind the stage and return the reply."""
            check_size(request)
            return await self.node.connect(request)

        return await _answer(context, connect())

    async def ConnectRing(self, request: pb.RingRequest, context: Context) -> pb.ConnectReply:
        """Open the link of the last stage to the first one."""

        async def connect() -> pb.ConnectReply:
            """Open the link and return the reply."""
            check_size(request)
            return await self.node.connect_ring(request)

        return await _answer(context, connect())

    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadReply:
        """Drop the stage and the lease."""

        async def unload() -> pb.UnloadReply:
            """Unload and return the reply."""
            self.node.unload(request)
            return pb.UnloadReply()

        return await _answer(context, unload())

    async def UpdateTrust(self, request: pb.TrustUpdate, context: Context) -> pb.TrustReply:
        """Install the cluster's authorities, removed nodes and, if given, a new certificate."""

        async def update() -> pb.TrustReply:
            """Install the update and return the reply."""
            trust = self.node.identity.trust
            if trust is None:
                raise AccessError("this worker belongs to no cluster")
            removed = frozenset(request.removed_nodes)
            trust.install(request.authorities, removed, request.certificate)
            return pb.TrustReply(signing_request=trust.due_request())

        return await _answer(context, update())

    async def ReadBackup(
        self, request: pb.BackupRequest, context: Context
    ) -> AsyncIterator[pb.BackupPiece]:
        """Yield the newest backup of a sequence."""
        try:
            async with contextlib.aclosing(read_backup(self.node, request)) as pieces:
                async for piece in pieces:
                    yield piece
        except ClusterError as error:
            await abort(context, error)

    async def WriteBackup(
        self, requests: AsyncIterator[pb.BackupPiece], context: Context
    ) -> pb.BackupReply:
        """Keep the backup of a sequence until a frame restores it."""

        async def write() -> pb.BackupReply:
            """Keep the backup and return the reply."""
            await write_backup(self.node, requests)
            return pb.BackupReply()

        return await _answer(context, write())

    async def ReportState(self, request: pb.StateReportRequest, context: Context) -> pb.StateReport:
        """Return the sequences and prefix entries that the engine holds."""
        return await _answer(context, self._report_state())

    async def ReportTrace(self, request: pb.TraceRequest, context: Context) -> pb.TraceReport:
        """Return the clock of the process and the stamps of its newest frames."""
        return await _answer(context, self._report_trace(request))

    async def _report_trace(self, request: pb.TraceRequest) -> pb.TraceReport:
        stamps = self.node.machinery.stamps.since(request.since_ns) if request.with_frames else []
        return pb.TraceReport(
            now_ns=time.monotonic_ns(),
            frames=[
                pb.FrameTimes(
                    epoch=one.epoch,
                    number=one.number,
                    stage=one.stage,
                    rows=one.rows,
                    times_ns=one.times,
                )
                for one in stamps
            ],
        )

    async def _report_state(self) -> pb.StateReport:
        node = self.node
        engine = node.binding.engine if node.binding is not None else None
        reply = pb.StateReport(epoch=node.epoch)
        if engine is not None:
            held = await node.machinery.thread.call(engine.report_state)
            reply.sequences.extend(
                pb.SequenceReport(
                    seq_id=s.seq_id,
                    length=s.committed,
                    capacity=s.capacity,
                    open_windows=s.open_windows,
                    bytes=s.nbytes,
                )
                for s in held.sequences
            )
            reply.prefixes.extend(
                pb.PrefixReport(entry=p.entry, length=p.length, bytes=p.nbytes)
                for p in held.prefixes
            )
        return reply

    async def Signals(
        self, requests: AsyncIterator[pb.Signal], context: Context
    ) -> AsyncIterator[pb.WorkerStatus]:
        """Apply the signals of one coordinator and yield the worker status while it keeps the lease."""
        try:
            first = from_message(await first_message(requests))
            if not isinstance(first.body, Hello):
                raise ProtocolError("the first signal is not a hello")
            hello = first.body
            holder = pb.Coordinator(id=hello.coordinator_id, name=hello.coordinator_name)
            lease = self.node.renew_lease(holder)
        except ClusterError as error:
            await abort(context, error)
            return
        lease.streams += 1
        reader = asyncio.create_task(self._read_signals(requests, lease))
        try:
            while not reader.done():
                yield self._worker_status()
                await self._wait_for_change(reader, hello.status_interval_ms / 1000)
                self._check_lease(lease)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await reader
        except ClusterError as error:
            await abort(context, error)
        finally:
            reader.cancel()
            lease.streams -= 1
            # The coordinator has gone, so its requests need no state any more.
            if self.node.lease is lease and not lease.streams:
                self.node.release()

    async def _wait_for_change(self, reader: asyncio.Task[None], seconds: float) -> None:
        """Wait `seconds`, or until an urgent change of state, or until the stream ends."""
        change = asyncio.create_task(self.node.state_changed.wait())
        try:
            await asyncio.wait(
                {reader, change}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:  # the task must not outlive the call
            change.cancel()
        self.node.state_changed.clear()

    def _check_lease(self, lease: Lease) -> None:
        """Raise NotReadyError when the lease of a stream has ended, although its coordinator may be alive."""
        self.node.release_lapsed()
        if self.node.lease is not lease:
            raise NotReadyError(f"worker {self.node.identity.name} no longer serves {lease.name}")

    async def _read_signals(self, requests: AsyncIterator[pb.Signal], lease: Lease) -> None:
        async for message in requests:
            signal = from_message(message)
            self._check_lease(lease)
            lease.renew()
            self.node.apply_signal(signal)

    def _worker_status(self) -> pb.WorkerStatus:
        node, thread, traffic = self.node, self.node.machinery.thread, self.node.machinery.traffic
        binding = node.binding
        engine = None if binding is None else binding.engine
        thread.wait_for_compiler()
        worker_status = pb.WorkerStatus(
            state=node.state,
            epoch=binding.place.epoch if binding and binding.bound else 0,
            frames_done=engine.frames_done if engine else 0,
            engine_stall_ms=int(thread.stall * 1000),
            link_stall_ms=int(binding.link_stall * 1000) if binding else 0,
            busy_us=thread.busy_us,
            memory_used=hardware.memory_used(),
            memory_cached=hardware.memory_cached(),
            bytes_in=traffic.bytes_in,
            bytes_out=traffic.bytes_out,
            messages_in=traffic.messages_in,
            messages_out=traffic.messages_out,
            machine=node.sensors.latest,
            awaits_tokens=binding is not None and binding.awaits_tokens,
        )
        if binding is not None and binding.fault is not None:
            worker_status.fault.CopyFrom(binding.fault)
        return worker_status


def make_server(node: WorkerNode) -> grpc.aio.Server:
    """Return a server with both planes. A worker with trust checks every call. The caller adds a port."""
    interceptors = []
    if (trust := node.identity.trust) is not None:
        interceptor = AccessInterceptor(trust)
        trust.on_removed = interceptor.end_calls_of
        interceptors.append(interceptor)
    server = grpc.aio.server(
        options=(*CHANNEL_OPTIONS, *_keepalive_options(), ("grpc.so_reuseport", 0)),
        maximum_concurrent_rpcs=64,
        interceptors=interceptors,
    )
    pb_grpc.add_WorkerServicer_to_server(WorkerService(node), server)
    server.add_generic_rpc_handlers((DataPlane(node).handler(), LinkTestService(trust).handler()))
    return server


def _keepalive_options() -> tuple[tuple[str, int], ...]:
    """Return the options that close the connections of machines that have vanished, also those without a call."""
    return (
        ("grpc.keepalive_time_ms", round(1e3 * KEEPALIVE_SECONDS)),
        ("grpc.keepalive_timeout_ms", round(1e3 * KEEPALIVE_REPLY_SECONDS)),
        # The keepalive timeout alone acts through TCP, and the server has Unix sockets behind the shared port.
        ("grpc.http2.ping_timeout_ms", round(1e3 * KEEPALIVE_REPLY_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


async def _answer(context: Context, work: Awaitable[T]) -> T:
    try:
        return await work
    except ClusterError as error:
        await abort(context, error)
        raise  # unreachable, because abort raises. The type checker needs it
