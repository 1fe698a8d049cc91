"""The coordinator's client of one worker: control calls with deadlines, and the Signals stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from itertools import chain
from typing import Any, TypeVar

import grpc
import grpc.aio

from coordinator.frame_trace.process_trace import (
    ClockOffset,
    FrameTimes,
    ProcessTrace,
    RoundTrip,
    align_clocks,
)
from coordinator.workers.report_check import reported_hop
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.backup import LayerState, PieceJoiner, ReceivedStates, split
from proto.control import Heartbeat, Hello, Signal, check_version, to_message
from proto.errors import ClusterError, DeadlineError, WorkerLostError
from proto.frame import VERSION
from proto.progress import OnProgress
from proto.rpc.channels import open_channel
from proto.rpc.hop_probe import HopFigures
from proto.rpc.status_codes import from_status
from proto.trust.identity import Role
from proto.trust.node_trust import NodeTrust

log = logging.getLogger(__name__)

T = TypeVar("T")

DESCRIBE_SECONDS = 30.0
"""Seconds. Bounds a Describe: the first one computes the fingerprint of a large checkpoint on a cold disk."""

CONTROL_SECONDS = 15.0
"""Seconds. Bounds the other unary calls."""

LOAD_SILENCE_SECONDS = 120.0
"""Seconds without progress after which a load has failed. One part of a large model takes seconds on a slow disk."""

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


class WorkerClient:
    """The calls to the worker at `address`. Errors are those of proto/errors.py and name the worker.

    With `trust` the client connects only to a worker of the coordinator's cluster and, if `node` is given, only to
    the worker with that node id.
    """

    def __init__(
        self, address: str, me: pb.Coordinator, trust: NodeTrust | None = None, node: str = ""
    ) -> None:
        self.address = address
        self.me = me
        self.trust = trust
        self.node = node
        self._channel = open_channel(address, trust, Role.WORKER, node)
        self._stub = pb_grpc.WorkerStub(self._channel)
        self._signals: asyncio.Queue[pb.Signal] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.worker_status: pb.WorkerStatus | None = None
        self._clock = ClockOffset()
        self._clock_until = 0.0
        """Monotonic seconds until which `_clock` is used."""
        self.link_seconds = 0.0
        """Measured seconds of one hop to the next stage; 0 before the first plan and for the last stage."""
        self.hop: HopFigures | None = None
        """Figures of the hop to the next stage, or from the last stage to the coordinator. None before a plan."""
        self.route_kind = ""
        """Kind of the network interface through which the coordinator reaches the worker; empty if unknown."""

    # ---- control

    async def describe(
        self, model: pb.ModelRef | None = None, timeout: float = DESCRIBE_SECONDS
    ) -> pb.WorkerInfo:
        """Return the worker's description.

        Raises VersionError for a worker of another release, and WorkerLostError when the worker is unreachable.
        """
        request = pb.DescribeRequest(protocol_version=VERSION, coordinator=self.me, model=model)
        info: pb.WorkerInfo = await self._call(self._stub.Describe(request, timeout=timeout))
        check_version(info.protocol_version)
        return info

    async def load(self, request: pb.LoadRequest, on_progress: OnProgress) -> pb.LoadResult:
        """Load a stage on the worker. Raises DeadlineError without progress, and the worker's error."""
        stream = self._stub.Load(request)
        try:
            while True:
                async with asyncio.timeout(LOAD_SILENCE_SECONDS):
                    message = await stream.read()
                if not isinstance(message, pb.LoadProgress):  # grpc.aio.EOF
                    raise WorkerLostError(f"{self.address} ended the load without a result")
                if message.WhichOneof("body") == "result":
                    return message.result
                on_progress(message.progress.done, message.progress.total)
        except TimeoutError:
            raise DeadlineError(
                f"{self.address} made no progress loading for {LOAD_SILENCE_SECONDS:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        except asyncio.CancelledError:
            _raise_if_cancelled()
            raise WorkerLostError(f"{self.address} was lost while it loaded") from None
        finally:
            stream.cancel()

    async def provide(
        self,
        offer: pb.WeightsOffer,
        answer: Callable[[pb.WantedTensors], AsyncIterator[pb.Weights]],
        on_progress: OnProgress,
    ) -> None:
        """Give the worker the tensors of `offer` that it lacks. `answer` yields the messages for a request."""
        call = self._stub.Provide()
        outgoing: asyncio.Queue[AsyncIterator[pb.Weights]] = asyncio.Queue()
        outgoing.put_nowait(_only(pb.Weights(offer=offer)))
        tasks = [
            asyncio.create_task(
                self._read_replies(call, lambda w: outgoing.put_nowait(answer(w)), on_progress)
            ),
            asyncio.create_task(_write_all(call, outgoing)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.InvalidStateError:  # a write to an ended call
            raise self._lost_during_transfer() from None
        except grpc.aio.AioRpcError as error:
            lost = error.code() is grpc.StatusCode.INTERNAL  # gRPC's code for a failed write
            raise (self._lost_during_transfer() if lost else self._translate(error)) from error
        except asyncio.CancelledError:
            _raise_if_cancelled()
            raise self._lost_during_transfer() from None
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_replies(
        self,
        call: grpc.aio.StreamStreamCall[pb.Weights, pb.WeightsReply],
        on_wanted: Callable[[pb.WantedTensors], None],
        on_progress: OnProgress,
    ) -> None:
        """Read replies until the worker has all tensors. Raises its refusal, and DeadlineError when it is silent."""
        while True:
            try:
                async with asyncio.timeout(LOAD_SILENCE_SECONDS):
                    reply = await call.read()
            except TimeoutError:
                raise DeadlineError(
                    f"{self.address} accepted no weights for {LOAD_SILENCE_SECONDS:g} s"
                ) from None
            if not isinstance(reply, pb.WeightsReply):  # grpc.aio.EOF
                raise self._lost_during_transfer()
            match reply.WhichOneof("body"):
                case "wanted":
                    on_wanted(reply.wanted)
                case "progress":
                    on_progress(reply.progress.done, reply.progress.total)
                case "refused":
                    found = reply.refused
                    raise from_status(
                        found.code, found.details, list(found.metadata.items()), self.address
                    )
                case _:
                    return

    def _lost_during_transfer(self) -> WorkerLostError:
        return WorkerLostError(
            f"{self.address} is lost: the connection ended during the transfer of weights"
        )

    async def connect(self, request: pb.ConnectRequest) -> pb.ConnectReply:
        """Bind the worker's stage into a plan, and keep the figures of its hop in `hop` and `link_seconds`."""
        reply: pb.ConnectReply = await self._call(
            self._stub.Connect(request, timeout=CONTROL_SECONDS)
        )
        self.hop = reported_hop(reply)
        self.link_seconds = self.hop.seconds if self.hop else 0.0
        return reply

    async def connect_ring(self, request: pb.RingRequest) -> None:
        """Open the link from the worker's stage, the last one, to the first stage of its plan."""
        await self._call(self._stub.ConnectRing(request, timeout=CONTROL_SECONDS))

    async def update_trust(self, request: pb.TrustUpdate) -> pb.TrustReply:
        """Install the cluster's authorities, removed nodes and, if given, a new certificate on the worker."""
        reply: pb.TrustReply = await self._call(
            self._stub.UpdateTrust(request, timeout=CONTROL_SECONDS)
        )
        return reply

    async def unload(self, epoch: int) -> None:
        """Make the worker drop its stage and its lease."""
        request = pb.UnloadRequest(coordinator=self.me, epoch=epoch)
        await self._call(self._stub.Unload(request, timeout=CONTROL_SECONDS))

    async def collect_trace(self, stage: int, epoch: int, since_ns: int) -> ProcessTrace:
        """Return the worker's stamps of the frames of `epoch` since `since_ns`, in the coordinator's clock."""
        clock = await self._align_clock()
        since = max(0, since_ns + clock.offset_ns)
        request = pb.TraceRequest(coordinator=self.me, with_frames=True, since_ns=since)
        reply = await self._report_trace(request)
        frames = tuple(
            FrameTimes(
                one.epoch,
                one.number,
                one.rows,
                tuple(moment - clock.offset_ns if moment else 0 for moment in one.times_ns),
            )
            for one in reply.frames
            if one.epoch == epoch
        )
        return ProcessTrace(f"stage {stage} {self.address}", stage, clock, frames)

    async def _align_clock(self) -> ClockOffset:
        """Return the offset of the worker's clock, measured within the last CLOCK_SECONDS."""
        if time.monotonic() >= self._clock_until:
            trips = []
            for _ in range(CLOCK_ROUND_TRIPS):
                sent = time.monotonic_ns()
                reply = await self._report_trace(pb.TraceRequest(coordinator=self.me))
                trips.append(RoundTrip(sent, reply.now_ns, time.monotonic_ns()))
            self._clock = align_clocks(trips)
            self._clock_until = time.monotonic() + CLOCK_SECONDS
        return self._clock

    async def _report_trace(self, request: pb.TraceRequest) -> pb.TraceReport:
        reply: pb.TraceReport = await self._call(
            self._stub.ReportTrace(request, timeout=CONTROL_SECONDS)
        )
        return reply

    async def report_state(self) -> pb.StateReport:
        """Return what the worker holds of requests."""
        request = pb.StateReportRequest(coordinator=self.me)
        reply: pb.StateReport = await self._call(
            self._stub.ReportState(request, timeout=CONTROL_SECONDS)
        )
        return reply

    async def read_backup(self, epoch: int, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence.

        Raises ProtocolError for a backup of more than `limit` bytes.
        """
        request = pb.BackupRequest(coordinator=self.me, epoch=epoch, seq_id=seq_id)
        stream = self._stub.ReadBackup(request, timeout=BACKUP_SECONDS)
        joiner, length, began = PieceJoiner(limit), 0, time.monotonic()
        try:
            async for piece in stream:
                if piece.HasField("head"):
                    length, began = piece.head.length, time.monotonic()
                else:
                    joiner.add_piece(piece)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        finally:
            stream.cancel()
        return ReceivedStates(length, joiner.states, time.monotonic() - began)

    async def write_backup(
        self, epoch: int, seq_id: int, tokens: Sequence[int], states: Iterable[LayerState]
    ) -> None:
        """Give the worker the state of its layers after `tokens`."""
        head = pb.BackupHead(
            coordinator=self.me, epoch=epoch, seq_id=seq_id, length=len(tokens), tokens=tokens
        )
        pieces = chain([pb.BackupPiece(head=head)], split(states))
        await self._call(self._stub.WriteBackup(iter(pieces), timeout=BACKUP_SECONDS))

    # ---- signals

    def watch(
        self,
        failure_timeout: float,
        on_status: Callable[[pb.WorkerStatus], None],
        on_lost: Callable[[ClusterError], None],
    ) -> None:
        """Open the Signals stream, send heartbeats and read statuses. Call `on_lost` once, when the stream fails."""
        interval = failure_timeout / STATUSES_PER_TIMEOUT
        self._tasks = [
            asyncio.create_task(self._read_statuses(failure_timeout, interval, on_status, on_lost)),
            asyncio.create_task(self._send_heartbeats(interval)),
        ]

    def send_signal(self, signal: Signal) -> None:
        """Queue a signal for the worker."""
        self._signals.put_nowait(to_message(signal))

    async def _write_signals(
        self, call: grpc.aio.StreamStreamCall[pb.Signal, pb.WorkerStatus], interval: float
    ) -> None:
        """Write signals until the call ends. The reader of the call reports the end."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            hello = Hello(self.me.id, self.me.name, int(interval * 1000))
            await call.write(to_message(Signal(0, hello)))
            while True:
                await call.write(await self._signals.get())

    async def _send_heartbeats(self, interval: float) -> None:
        while True:
            self.send_signal(Signal(0, Heartbeat()))
            await asyncio.sleep(interval)

    async def _read_statuses(
        self,
        failure_timeout: float,
        interval: float,
        on_status: Callable[[pb.WorkerStatus], None],
        on_lost: Callable[[ClusterError], None],
    ) -> None:
        call = self._stub.Signals()
        writing = asyncio.create_task(self._write_signals(call, interval))
        try:
            while True:
                worker_status = await _in_time(call.read(), failure_timeout)
                if not isinstance(worker_status, pb.WorkerStatus):  # grpc.aio.EOF
                    raise WorkerLostError(f"{self.address} closed its signal stream")
                self.worker_status = worker_status
                on_status(worker_status)
        except TimeoutError:
            on_lost(WorkerLostError(f"{self.address} was silent for {failure_timeout:g} s"))
        except grpc.aio.AioRpcError as error:
            on_lost(self._translate(error))
        except ClusterError as error:
            on_lost(error)
        finally:
            writing.cancel()
            call.cancel()

    async def close(self) -> None:
        """End the Signals stream and close the connection."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        await self._channel.close()

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    def _translate(self, error: grpc.aio.AioRpcError) -> ClusterError:
        return from_status(
            error.code().name, error.details(), error.trailing_metadata(), self.address
        )


async def _in_time(reading: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the result of `reading`. Raises TimeoutError after `seconds` in which the event loop was responsive.

    A busy machine may delay the loop itself. The function then waits once more for as long as the loop was late.
    """
    task = asyncio.create_task(reading)
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


def _raise_if_cancelled() -> None:
    """Raise CancelledError if the caller is cancelled. gRPC also raises it in calls of a channel that is closed."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise asyncio.CancelledError


async def _only(message: pb.Weights) -> AsyncIterator[pb.Weights]:
    yield message


async def _write_all(
    call: grpc.aio.StreamStreamCall[pb.Weights, pb.WeightsReply],
    outgoing: asyncio.Queue[AsyncIterator[pb.Weights]],
) -> None:
    """Write the messages of one iterator after another. Only an error ends it."""
    while True:
        async for message in await outgoing.get():
            await call.write(message)
