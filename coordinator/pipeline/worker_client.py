"""The client of one worker: its control calls, its signals and its statuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import grpc
import grpc.aio

from coordinator.status.frame_trace import FrameTimes, ProcessTrace, RoundTrip, clock_offset
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.backup import LayerState, PieceJoiner, ReceivedStates, prefix_key, split
from proto.control import check_version
from proto.errors import ClusterError, DeadlineError, WorkerLostError
from proto.frame import VERSION
from proto.rpc.channels import open_channel
from proto.rpc.data_connection import HopFigures
from proto.rpc.status_codes import from_status
from proto.span import Span
from proto.terminal.progress import OnProgress
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

MAX_SPEED = 1e15
"""Bytes per second. Far above any memory, and small enough for exact planning."""

MAX_HOP_US = 60e6
"""Microseconds of one hop. A hop that takes a minute has failed by the timeout before."""

DESCRIBE_SECONDS = 30.0
"""Seconds. Bounds a Describe: the first one computes the fingerprint of a large checkpoint on a cold disk."""

T = TypeVar("T")

CONTROL_SECONDS = 15.0
"""Seconds. Bounds the other unary calls."""

LOAD_SILENCE_SECONDS = 120.0
"""Seconds without progress after which a load has failed. One part of a large model takes seconds on a slow disk."""

TOKENS_AT_ONCE = 2**14
"""Tokens of a message about a prefix."""

FIND_SECONDS = 2.0
"""Seconds. Bounds the search of a prefix on a worker's disk."""

BACKUP_SECONDS = 60.0
"""Seconds. Bounds the transfer of a sequence's state on a stage. 400 MB take 4 s at 1 Gbit/s."""

STATUSES_PER_TIMEOUT = 6
"""Status messages per failure timeout. A few may be late without a false alarm."""

NOTICE_SHARE = 2 / 3
"""Share of the failure timeout for which frames may stand still. A status message arrives one interval later."""

CLOSE_SECONDS = 1.0
"""Seconds. Maximum wait for a cancelled stream to end."""

CLOCK_SECONDS = 10.0
"""Seconds for which an aligned clock is used again. Two clocks drift apart by less than 0.1 ms in this time."""

CLOCK_ROUND_TRIPS = 16
"""Round trips that align a worker's clock. The error is half of the shortest, 0.2 ms on an idle local network."""

LATE_SECONDS = 0.2
"""Seconds. A timer that fires later than this shows a busy coordinator, not a silent worker."""


def reported_hop(reply: pb.ConnectReply) -> HopFigures | None:
    """Return the figures of a worker's hop to the next stage, or None for a stage without one or invalid figures."""
    if not 0 < reply.link_us <= MAX_HOP_US or not 0 <= reply.link_bytes_per_second <= MAX_SPEED:
        return None
    return HopFigures(reply.link_us / 1e6, reply.link_bytes_per_second)


@dataclass(eq=False)
class WorkerClient:
    """The calls to the worker at `address`. Errors are those of proto/errors.py and name the worker.

    With `trust` it connects only to a worker of the cluster and, if `node` is given, only to that node.
    """

    address: str
    me: pb.Coordinator
    trust: NodeTrust | None = None
    node: str = ""
    owner: str = ""
    """Address of the worker that a plan names. A process that it started for a group has its own address."""

    def __post_init__(self) -> None:
        self.member: WorkerClient | None = None
        """The process that the worker has started for a group, while a plan uses it."""
        self.failure: ClusterError | None = None
        """Why the client was closed, for the calls that wait for the worker."""
        self.owner = self.owner or self.address
        self._channel = open_channel(self.address, self.trust, self.node)
        self.stub = pb_grpc.WorkerStub(self._channel)
        self._signals: asyncio.Queue[pb.Signal] = asyncio.Queue()
        self._watching: asyncio.Task[None] | None = None
        self.starting_seconds = 0.0
        """Least seconds of silence after which the worker is lost, while it starts."""
        self.worker_status: pb.WorkerStatus | None = None
        self._clock = 0  # nanoseconds, used until `_clock_until`
        self._clock_until = 0.0
        self.hop: HopFigures | None = None
        """Figures of the hop to the next stage, or from the last stage to the coordinator. None before a plan."""
        self.has_disk = False
        """True if the worker keeps the prefixes of its present stage on disk."""

    # ---- control

    async def call(self, method: Callable[..., Awaitable[T]], request: object, timeout: float = CONTROL_SECONDS) -> T:
        """Return the reply of `method`, one of `stub`, within `timeout` seconds. Raises the worker's error."""
        try:
            return await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        except grpc.aio.UsageError:  # the channel was closed
            raise self._connection_lost() from None

    async def describe(
        self, model: pb.ModelRef | None = None, timeout: float = DESCRIBE_SECONDS, refusal: str = ""
    ) -> pb.WorkerInfo:
        """Return the worker's description. Raises VersionError for another release, or WorkerLostError.

        `refusal` tells the worker why it was not used after the description before.
        """
        request = pb.DescribeRequest(protocol_version=VERSION, model=model, refusal=refusal)
        info: pb.WorkerInfo = await self.call(self.stub.Describe, request, timeout)
        check_version(info.protocol_version)
        return info

    async def load(self, request: pb.LoadRequest, on_progress: OnProgress) -> pb.LoadResult:
        """Load a stage on the worker. Raises DeadlineError without progress, and the worker's error."""
        with self._errors_of("made no progress loading"):
            stream = self.stub.Load(request)
            try:
                while True:
                    message = await self._next(stream.read, pb.LoadProgress)
                    if message.WhichOneof("body") == "result":
                        return message.result
                    on_progress(message.progress.done, message.progress.total)
            finally:
                stream.cancel()

    async def _next(self, read: Callable[[], Awaitable[object]], kind: type[T]) -> T:
        """Return the next message of a load. Raises TimeoutError, or WorkerLostError at its end."""
        async with asyncio.timeout(LOAD_SILENCE_SECONDS):
            message = await read()
        if not isinstance(message, kind):  # grpc.aio.EOF
            raise WorkerLostError(f"{self.address} ended the load without a result")
        return message

    async def provide(
        self,
        offer: pb.WeightsOffer,
        answer: Callable[[pb.WantedTensors], AsyncIterator[pb.Weights]],
        on_progress: OnProgress,
    ) -> None:
        """Give the worker the tensors of `offer` that it lacks. `answer` yields the messages for a request."""
        call = self.stub.Provide()
        wanted: asyncio.Queue[pb.WantedTensors] = asyncio.Queue()

        async def write() -> None:
            """Write the offer, then the answers to requests. Only an error ends it."""
            await call.write(pb.Weights(offer=offer))
            while True:
                async for message in answer(await wanted.get()):
                    await call.write(message)

        async def read() -> None:
            """Read replies until the worker has all tensors. Raises its refusal."""
            while True:
                reply = await self._next(call.read, pb.WeightsReply)
                match reply.WhichOneof("body"):
                    case "wanted":
                        wanted.put_nowait(reply.wanted)
                    case "progress":
                        on_progress(reply.progress.done, reply.progress.total)
                    case "refused":
                        code, trailing = reply.refused.code, list(reply.refused.metadata.items())
                        raise from_status(code, reply.refused.details, trailing, self.address)
                    case _:
                        return

        tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
        try:
            with self._errors_of("accepted no weights"):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def _errors_of(self, silence: str) -> Iterator[None]:
        """Translate the errors of a call inside the block. `silence` is what a worker did that timed out."""
        try:
            yield
        except TimeoutError:
            late = f"{self.address} {silence} for {LOAD_SILENCE_SECONDS:g} s"
            raise DeadlineError(late) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:  # gRPC's code for a failed write
                raise self._connection_lost() from error
            raise self._translate(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError):  # an ended call or channel
            raise self._connection_lost() from None
        except asyncio.CancelledError:
            # gRPC also raises it in calls of a channel that is closed.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._connection_lost() from None

    def _connection_lost(self) -> ClusterError:
        lost = WorkerLostError(f"{self.address} is lost: the connection ended during a call")
        return self.failure or lost

    async def connect(self, request: pb.ConnectRequest) -> None:
        """Bind the worker's stage into a plan. Keep the figures of its hop in `hop`, and whether it has a disk."""
        reply: pb.ConnectReply = await self.call(self.stub.Connect, request)
        self.hop, self.has_disk = reported_hop(reply), reply.has_disk

    async def update_trust(self, request: pb.TrustUpdate) -> pb.TrustReply:
        """Install the cluster's authorities, removed nodes and, if given, a new certificate on the worker."""
        return await self.call(self.stub.UpdateTrust, request)

    async def collect_trace(self, stage: int, epoch: int, since_ns: int) -> ProcessTrace:
        """Return the worker's stamps of the frames of `epoch` since `since_ns`, in the coordinator's clock."""
        offset = await self._align_clock()
        request = pb.TraceRequest(with_frames=True, since_ns=max(0, since_ns + offset))
        reply: pb.TraceReport = await self.call(self.stub.ReportTrace, request)
        frames = (
            FrameTimes(f.epoch, f.number, f.rows, tuple(ns and ns - offset for ns in f.times_ns))
            for f in reply.frames
            if f.epoch == epoch
        )
        return ProcessTrace(f"stage {stage} {self.address}", stage, tuple(frames))

    async def _align_clock(self) -> int:
        """Return the worker's clock minus the coordinator's, measured within the last CLOCK_SECONDS."""
        if time.monotonic() >= self._clock_until:
            trips = []
            for _ in range(CLOCK_ROUND_TRIPS):
                sent = time.monotonic_ns()
                reply: pb.TraceReport = await self.call(self.stub.ReportTrace, pb.TraceRequest())
                trips.append(RoundTrip(sent, reply.now_ns, time.monotonic_ns()))
            self._clock = clock_offset(trips)
            self._clock_until = time.monotonic() + CLOCK_SECONDS
        return self._clock

    async def read_backup(self, epoch: int, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence. Raises ProtocolError for a backup of more than `limit` bytes."""
        request = pb.BackupRequest(coordinator=self.me, epoch=epoch, seq_id=seq_id)
        stream = self.stub.ReadBackup(request, timeout=BACKUP_SECONDS)
        joiner, length, seconds, last = PieceJoiner(limit), 0, 0.0, time.monotonic()
        try:
            async for piece in stream:
                now = time.monotonic()
                if piece.HasField("head"):  # after a wait for the engine
                    length = piece.head.length
                else:
                    joiner.add_piece(piece)
                    seconds += now - last
                last = now
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        finally:
            stream.cancel()
        return ReceivedStates(length, joiner.states, seconds)

    async def write_backup(self, epoch: int, seq_id: int, tokens: Sequence[int], states: Iterable[LayerState]) -> None:
        """Give the worker the state of its layers after `tokens`."""
        head = pb.BackupHead(coordinator=self.me, epoch=epoch, seq_id=seq_id, length=len(tokens), tokens=tokens)
        pieces = chain([pb.BackupPiece(head=head)], split(states))
        await self.call(self.stub.WriteBackup, iter(pieces), BACKUP_SECONDS)

    async def find_prefix(self, epoch: int, tokens: Sequence[int]) -> pb.PrefixReply:
        """Return which prefixes of a prompt are on the worker's disk."""
        requests = self._prefix_requests(epoch, 0, tokens)
        return await self.call(self.stub.FindPrefix, requests, FIND_SECONDS)

    async def load_prefix(self, epoch: int, seq_id: int, tokens: Sequence[int]) -> None:
        """Let the worker read the state after `tokens` from its disk."""
        requests = self._prefix_requests(epoch, seq_id, tokens)
        await self.call(self.stub.LoadPrefix, requests, BACKUP_SECONDS)

    async def copy_states(
        self, source: WorkerClient, epoch: int, seq_id: int, tokens: Sequence[int], layers: Span
    ) -> None:
        """Give the worker the state of `layers` after `tokens` from the disk of `source`, piece by piece."""
        span = pb.Span(start=layers.start, end=layers.end)
        request = pb.BlockRequest(coordinator=self.me, epoch=epoch, key=prefix_key(tokens), layers=span)
        stream, failures = source.stub.ReadBlocks(request, timeout=BACKUP_SECONDS), list[grpc.aio.AioRpcError]()

        async def pieces() -> AsyncIterator[pb.BackupPiece]:
            head = pb.BackupHead(coordinator=self.me, epoch=epoch, seq_id=seq_id, length=len(tokens), tokens=tokens)
            head.from_disk = True
            yield pb.BackupPiece(head=head)
            try:
                async for piece in stream:
                    yield piece
            except grpc.aio.AioRpcError as error:  # gRPC would cancel the call, and so this task
                failures.append(error)

        try:
            await self.call(self.stub.WriteBackup, pieces(), BACKUP_SECONDS)
        finally:
            stream.cancel()
        if failures:
            raise source._translate(failures[0]) from failures[0]

    def _prefix_requests(self, epoch: int, seq_id: int, tokens: Sequence[int]) -> Iterator[pb.PrefixRequest]:
        """Yield the messages of a call about `tokens`."""
        yield pb.PrefixRequest(coordinator=self.me, epoch=epoch, seq_id=seq_id, tokens=tokens[:TOKENS_AT_ONCE])
        for start in range(TOKENS_AT_ONCE, len(tokens), TOKENS_AT_ONCE):
            yield pb.PrefixRequest(tokens=tokens[start : start + TOKENS_AT_ONCE])

    # ---- signals

    def watch(
        self,
        failure_timeout: float,
        on_status: Callable[[pb.WorkerStatus], None],
        on_lost: Callable[[ClusterError], None],
    ) -> None:
        """Open the Signals stream, send heartbeats and read statuses. Call `on_lost` once, when the stream fails."""

        async def read_statuses() -> None:
            call = self.stub.Signals()
            interval = failure_timeout / STATUSES_PER_TIMEOUT
            writing = asyncio.create_task(self._write_signals(call, interval))
            try:
                while True:
                    allowed = max(failure_timeout, self.starting_seconds)
                    worker_status = await _in_time(call.read(), allowed)
                    if not isinstance(worker_status, pb.WorkerStatus):  # grpc.aio.EOF
                        raise WorkerLostError(f"{self.address} closed its signal stream")
                    self.worker_status = worker_status
                    on_status(worker_status)
            except TimeoutError:
                on_lost(WorkerLostError(f"{self.address} was silent for {allowed:g} s"))
            except grpc.aio.AioRpcError as error:
                on_lost(self._translate(error))
            except ClusterError as error:
                on_lost(error)
            except Exception as error:  # a bug here: an unwatched worker must not stay in use
                log.exception("a status failed")
                on_lost(WorkerLostError(f"its status failed: {type(error).__name__}: {error}"))
            finally:
                writing.cancel()
                call.cancel()

        self._watching = asyncio.create_task(read_statuses())

    def send_signal(self, signal: pb.Signal) -> None:
        """Queue a signal for the worker."""
        self._signals.put_nowait(signal)

    async def _write_signals(
        self, call: grpc.aio.StreamStreamCall[pb.Signal, pb.WorkerStatus], interval: float
    ) -> None:
        """Write signals, and heartbeats in between, until the call ends. The reader of the call reports the end."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            ms = int(interval * 1000)
            hello = pb.Hello(coordinator=self.me, protocol_version=VERSION, status_interval_ms=ms)
            await call.write(pb.Signal(hello=hello))
            while True:
                signal = pb.Signal(heartbeat=pb.Heartbeat())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        signal = await self._signals.get()
                await call.write(signal)

    async def close(self) -> None:
        """End the Signals stream and close the connection."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching}, timeout=CLOSE_SECONDS)
        await self._channel.close()

    def _translate(self, error: grpc.aio.AioRpcError) -> ClusterError:
        code, trailing = error.code().name, error.trailing_metadata()
        return from_status(code, error.details(), trailing, self.address)


async def _in_time(reading: Awaitable[T], seconds: float) -> T:
    """Return the result of `reading`. Raises TimeoutError after `seconds` in which the loop was responsive."""
    task = asyncio.ensure_future(reading)
    try:
        due = time.monotonic() + seconds
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done and (late := time.monotonic() - due) > LATE_SECONDS:
            done, _ = await asyncio.wait({task}, timeout=min(seconds, late))
        if not done:
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
