"""The worker's gRPC face: protobuf calls and raw frame streams, turned into calls on the node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import grpc.aio
import mlx.core as mx

from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.control import Hello, check_version, from_message
from proto.errors import AccessError, ClusterError, NotReadyError, ProtocolError
from proto.frame import VERSION
from proto.rpc.data_plane import CHANNEL_OPTIONS, FRAMES, RESULTS, SERVICE, StreamBinding
from proto.rpc.link import Link
from proto.rpc.status_codes import to_status
from worker.engine import hardware
from worker.engine.stage_engine import StageEngine
from worker.fetch.provide import provide
from worker.model.loader import DTYPES
from worker.node.lease import Lease
from worker.node.loading import LoadedStage
from worker.node.node import WorkerNode

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

STOP_SECONDS = 1.0
"""How long open calls may take to end when the server stops."""


class WorkerService(pb_grpc.WorkerServicer):
    """Control calls. Every ClusterError becomes its gRPC status."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.WorkerInfo:
        return await _answer(context, self._describe(request))

    async def _describe(self, request: pb.DescribeRequest) -> pb.WorkerInfo:
        check_version(request.protocol_version)
        node, identity = self.node, self.node.identity
        node.release_lapsed()
        info = pb.WorkerInfo(
            protocol_version=VERSION,
            package_version=version("mtp-cluster"),
            worker_id=identity.id,
            name=identity.name,
            hardware=hardware.describe(
                identity.memory_limit, list(DTYPES), identity.bytes_per_second
            ),
            model=identity.models.own.name if identity.models.own else "",
            state=node.state,
            uptime_ms=int((time.monotonic() - identity.started) * 1000),
        )
        if identity.pinned is not None:
            info.pinned.CopyFrom(pb.Span(start=identity.pinned.start, end=identity.pinned.end))
        if request.HasField("model"):
            info.fingerprint = await asyncio.to_thread(
                identity.models.fingerprint_of, request.model
            )
        if node.lease is not None:
            info.leased_to.CopyFrom(pb.Coordinator(id=node.lease.id, name=node.lease.name))
        if node.loaded is not None:
            info.loaded.CopyFrom(_loaded(node.loaded, node.epoch))
        return info

    async def Load(
        self, request: pb.LoadRequest, context: Context
    ) -> AsyncIterator[pb.LoadProgress]:
        progress: asyncio.Queue[pb.LoadProgress] = asyncio.Queue()

        def on_progress(done: int, total: int) -> None:
            progress.put_nowait(pb.LoadProgress(progress=pb.LoadBytes(done=done, total=total)))

        task = asyncio.create_task(self.node.load(request, on_progress))
        task.add_done_callback(lambda _: progress.put_nowait(pb.LoadProgress()))
        try:
            while (message := await progress.get()).WhichOneof("body"):
                yield message
            yield pb.LoadProgress(result=await task)
        except ClusterError as error:
            await _abort(context, error)
        finally:
            task.cancel()

    async def Provide(
        self, requests: AsyncIterator[pb.Weights], context: Context
    ) -> AsyncIterator[pb.WeightsReply]:
        try:
            async with contextlib.aclosing(provide(requests, self.node.hold)) as replies:
                async for reply in replies:
                    yield reply
        except ClusterError as error:
            await _abort(context, error)

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectReply:
        return await _answer(context, self.node.connect(request))

    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadReply:
        async def unload() -> pb.UnloadReply:
            self.node.unload(request)
            return pb.UnloadReply(memory_used=mx.get_active_memory())

        return await _answer(context, unload())

    async def ReportState(self, request: pb.StateReportRequest, context: Context) -> pb.StateReport:
        return await _answer(context, self._report_state())

    async def _report_state(self) -> pb.StateReport:
        node, thread = self.node, self.node.machinery.thread
        engine, link = _engine_and_link(node)
        reply = pb.StateReport(
            epoch=node.epoch,
            memory_used=mx.get_active_memory(),
            queued_in=thread.queued,
            queued_out=link.queued if link else 0,
        )
        if engine is not None:
            held = await thread.call(engine.report_state)
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
        try:
            first = from_message(await anext(requests))
            if not isinstance(first.body, Hello):
                raise ProtocolError("the first signal is a hello")
            hello = first.body
            holder = pb.Coordinator(id=hello.coordinator_id, name=hello.coordinator_name)
            lease = self.node.hold(holder)
        except ClusterError as error:
            await _abort(context, error)
            return
        except StopAsyncIteration:
            return
        lease.streams += 1
        heard = Heard()
        reader = asyncio.create_task(self._read_signals(requests, lease, heard))
        try:
            number = 0
            while not reader.done():
                number += 1
                yield self._worker_status(number, heard.heartbeat)
                await self._until_news(reader, hello.status_interval_ms / 1000)
                self._check_lease(lease)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await reader
        except ClusterError as error:
            await _abort(context, error)
        finally:
            reader.cancel()
            lease.streams -= 1
            # The coordinator is gone, or left us: nobody waits for what we hold of its requests.
            if self.node.lease is lease and not lease.streams:
                self.node.release()

    async def _until_news(self, reader: asyncio.Task[None], seconds: float) -> None:
        """Wait for the next pulse's time, for something to tell at once, or for the end of the stream."""
        news = asyncio.create_task(self.node.news.wait())
        try:
            await asyncio.wait({reader, news}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the call ends in between: the wait would outlive it
            news.cancel()
        self.node.news.clear()

    def _check_lease(self, lease: Lease) -> None:
        """End a stream whose coordinator has not been heard for its lease: it may live, but not with us."""
        self.node.release_lapsed()
        if self.node.lease is not lease:
            raise NotReadyError(f"worker {self.node.identity.name} no longer serves {lease.name}")

    async def _read_signals(
        self, requests: AsyncIterator[pb.Signal], lease: Lease, heard: Heard
    ) -> None:
        async for message in requests:
            signal = from_message(message)
            self._check_lease(lease)
            lease.renew()
            if message.WhichOneof("body") == "heartbeat":
                heard.heartbeat = message.heartbeat.number
            else:
                self.node.signal(signal)

    def _worker_status(self, number: int, heartbeat: int) -> pb.WorkerStatus:
        node, thread, traffic = self.node, self.node.machinery.thread, self.node.machinery.traffic
        binding = node.binding
        engine, link = _engine_and_link(node)
        worker_status = pb.WorkerStatus(
            number=number,
            worker_id=node.identity.id,
            state=node.state,
            epoch=binding.place.epoch if binding and binding.bound else 0,
            heartbeat=heartbeat,
            frames_done=engine.frames_done if engine else 0,
            queued_in=thread.queued,
            queued_out=link.queued if link else 0,
            engine_stall_ms=int(thread.stall * 1000),
            link_stall_ms=int(link.stall * 1000) if link else 0,
            busy_us=thread.busy_us,
            memory_used=mx.get_active_memory(),
            memory_peak=mx.get_peak_memory(),
            sequences=len(engine.sequences) if engine else 0,
            prefix_entries=len(engine.prefixes) if engine else 0,
            rows_done=traffic.rows,
            segments_skipped=traffic.skipped,
            bytes_in=traffic.bytes_in,
            bytes_out=traffic.bytes_out,
            messages_in=traffic.messages_in,
            messages_out=traffic.messages_out,
        )
        if binding is not None and binding.fault is not None:
            worker_status.fault.CopyFrom(binding.fault)
        return worker_status


class Heard:
    """The newest heartbeat a Signals stream brought."""

    heartbeat = 0


class DataPlane:
    """The two raw byte streams."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node

    def handler(self) -> grpc.GenericRpcHandler:
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
        """Frames from the stage before, or from the coordinator."""
        try:
            binding = self.node.binding_of(_stream_binding(context))
            await context.send_initial_metadata(())
            async for data in requests:
                binding.take(data)
        except ClusterError as error:
            await _abort(context, error)
        return
        yield b""  # never: the stream goes one way, and a generator is what gRPC wants

    async def results(self, _: bytes, context: Context) -> AsyncIterator[bytes]:
        """Frames that have been through the last stage, for the coordinator."""
        try:
            binding = self.node.binding_of(_stream_binding(context))
            if not binding.place.last:
                raise AccessError(f"stage {binding.place.stage} is not the last: it has no results")
            await context.send_initial_metadata(())
            while isinstance(item := await binding.results.get(), bytes):
                yield item
            raise item
        except ClusterError as error:
            await _abort(context, error)


def make_server(node: WorkerNode) -> grpc.aio.Server:
    """A server with both planes; the caller adds a port."""
    server = grpc.aio.server(
        options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)), maximum_concurrent_rpcs=64
    )
    pb_grpc.add_WorkerServicer_to_server(WorkerService(node), server)
    server.add_generic_rpc_handlers((DataPlane(node).handler(),))
    return server


def _engine_and_link(node: WorkerNode) -> tuple[StageEngine | None, Link | None]:
    binding = node.binding
    return (binding.engine, binding.link) if binding is not None else (None, None)


def _loaded(loaded: LoadedStage, epoch: int) -> pb.LoadedStage:
    key = loaded.key
    return pb.LoadedStage(
        epoch=epoch,
        span=pb.Span(start=key.span.start, end=key.span.end),
        first=key.first,
        last=key.last,
        fingerprint=key.fingerprint,
        dtype=key.dtype,
        kv_bits=key.kv_bits,
        mtp=key.mtp,
        weight_bytes=loaded.weight_bytes,
    )


def _stream_binding(context: Context) -> StreamBinding:
    return StreamBinding.from_metadata(list(context.invocation_metadata() or ()))


async def _answer(context: Context, work: Awaitable[T]) -> T:
    try:
        return await work
    except ClusterError as error:
        await _abort(context, error)
        raise  # abort raises; this tells the type checker


async def _abort(context: Context, error: ClusterError) -> None:
    log.info("call refused", extra={"error": str(error)})
    status = to_status(error)
    await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)
