"""One worker as the coordinator calls it: control calls with deadlines, and the Signals stream both ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.control import Heartbeat, Hello, Signal, check_version, to_message
from proto.errors import ClusterError, DeadlineError, WorkerLostError
from proto.frame import VERSION
from proto.progress import OnProgress
from proto.rpc.data_plane import CHANNEL_OPTIONS
from proto.rpc.status_codes import from_status

log = logging.getLogger(__name__)

T = TypeVar("T")

DESCRIBE_SECONDS = 30.0
"""A first Describe computes the fingerprint of a large checkpoint on a cold disk."""

CONTROL_SECONDS = 15.0
LOAD_SILENCE_SECONDS = 120.0
"""A load that reports no progress for so long is stuck: one part of a large model on a slow disk takes seconds."""

STATUSES_PER_TIMEOUT = 6
"""Pulses asked for within one failure timeout: a few may be late without a false alarm."""

NOTICE_SHARE = 2 / 3
"""Of the failure timeout: how long nothing may move by the word of a worker, which comes up to a pulse later."""

CLOSE_SECONDS = 1.0
"""Longest wait for a stream to end, once it is told to."""

LATE_SECONDS = 0.2
"""A timer that goes off so late tells of this process, not of the worker it was set for."""


class WorkerClient:
    """Calls to the worker at `address`. Errors are those of proto/errors.py, naming the worker."""

    def __init__(self, address: str, me: pb.Coordinator) -> None:
        self.address = address
        self.me = me
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.WorkerStub(self._channel)
        self._signals: asyncio.Queue[pb.Signal] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.worker_status: pb.WorkerStatus | None = None
        self.pulse_at = 0.0

    # ---- control

    async def describe(
        self, model: pb.ModelRef | None = None, timeout: float = DESCRIBE_SECONDS
    ) -> pb.WorkerInfo:
        """Raises VersionError for a worker of another release, WorkerLostError when nobody answers."""
        request = pb.DescribeRequest(protocol_version=VERSION, coordinator=self.me, model=model)
        info: pb.WorkerInfo = await self._call(self._stub.Describe(request, timeout=timeout))
        check_version(info.protocol_version)
        return info

    async def load(self, request: pb.LoadRequest, on_progress: OnProgress) -> pb.LoadResult:
        """Have the worker load a stage; `on_progress(done, total)` in bytes."""
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
        finally:
            stream.cancel()

    async def provide(
        self,
        offer: pb.WeightsOffer,
        answer: Callable[[pb.WantedTensors], AsyncIterator[pb.Weights]],
        on_progress: OnProgress,
    ) -> None:
        """Have the worker get what it lacks of `offer`; `answer` gives the messages for what it wants."""
        call = self._stub.Provide()
        outgoing: asyncio.Queue[AsyncIterator[pb.Weights]] = asyncio.Queue()
        outgoing.put_nowait(_only(pb.Weights(offer=offer)))
        tasks = [
            asyncio.create_task(
                self._hear_provided(call, lambda w: outgoing.put_nowait(answer(w)), on_progress)
            ),
            asyncio.create_task(_write_all(call, outgoing)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.InvalidStateError:  # written to a call that is over
            raise self._lost_amid_weights() from None
        except grpc.aio.AioRpcError as error:
            lost = error.code() is grpc.StatusCode.INTERNAL  # what gRPC says of a failed write
            raise (self._lost_amid_weights() if lost else self._translate(error)) from error
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear_provided(
        self,
        call: Any,
        on_wanted: Callable[[pb.WantedTensors], None],
        on_progress: OnProgress,
    ) -> None:
        """Read a worker's replies until it has all; raises what it refuses for, and DeadlineError when it is silent."""
        while True:
            try:
                async with asyncio.timeout(LOAD_SILENCE_SECONDS):
                    reply = await call.read()
            except TimeoutError:
                raise DeadlineError(
                    f"{self.address} took no weights for {LOAD_SILENCE_SECONDS:g} s"
                ) from None
            if not isinstance(reply, pb.WeightsReply):  # grpc.aio.EOF
                raise self._lost_amid_weights()
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

    def _lost_amid_weights(self) -> WorkerLostError:
        return WorkerLostError(f"{self.address} is lost, in the middle of its weights")

    async def connect(self, request: pb.ConnectRequest) -> pb.ConnectReply:
        reply: pb.ConnectReply = await self._call(
            self._stub.Connect(request, timeout=CONTROL_SECONDS)
        )
        return reply

    async def unload(self, epoch: int) -> None:
        request = pb.UnloadRequest(coordinator=self.me, epoch=epoch)
        await self._call(self._stub.Unload(request, timeout=CONTROL_SECONDS))

    async def report_state(self) -> pb.StateReport:
        request = pb.StateReportRequest(coordinator=self.me)
        reply: pb.StateReport = await self._call(
            self._stub.ReportState(request, timeout=CONTROL_SECONDS)
        )
        return reply

    # ---- signals

    def watch(
        self,
        failure_timeout: float,
        on_status: Callable[[pb.WorkerStatus], None],
        on_lost: Callable[[ClusterError], None],
    ) -> None:
        """Open the Signals stream: beat, and hear pulses. `on_lost` is called once, when it ends or falls silent."""
        interval = failure_timeout / STATUSES_PER_TIMEOUT
        self._tasks = [
            asyncio.create_task(self._hear(failure_timeout, interval, on_status, on_lost)),
            asyncio.create_task(self._beat(interval)),
        ]

    def signal(self, signal: Signal) -> None:
        self._signals.put_nowait(to_message(signal))

    async def _speak(self, call: Any, interval: float) -> None:
        """Write signals for as long as the call lives; whoever reads it notices its end."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            hello = Hello(self.me.id, self.me.name, int(interval * 1000))
            await call.write(to_message(Signal(0, hello)))
            while True:
                await call.write(await self._signals.get())

    async def _beat(self, interval: float) -> None:
        for number in itertools.count(1):
            self.signal(Signal(0, Heartbeat(number)))
            await asyncio.sleep(interval)

    async def _hear(
        self,
        failure_timeout: float,
        interval: float,
        on_status: Callable[[pb.WorkerStatus], None],
        on_lost: Callable[[ClusterError], None],
    ) -> None:
        call = self._stub.Signals()
        speaking = asyncio.create_task(self._speak(call, interval))
        try:
            while True:
                worker_status = await _in_time(call.read(), failure_timeout)
                if not isinstance(worker_status, pb.WorkerStatus):  # grpc.aio.EOF
                    raise WorkerLostError(f"{self.address} closed its signal stream")
                self.worker_status, self.pulse_at = worker_status, time.monotonic()
                on_status(worker_status)
        except TimeoutError:
            on_lost(WorkerLostError(f"{self.address} was silent for {failure_timeout:g} s"))
        except grpc.aio.AioRpcError as error:
            on_lost(self._translate(error))
        except ClusterError as error:
            on_lost(error)
        finally:
            speaking.cancel()
            call.cancel()

    async def close(self) -> None:
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

    def _translate(self, error: Any) -> ClusterError:
        return from_status(
            error.code().name, error.details(), error.trailing_metadata(), self.address
        )


async def _in_time(reading: Coroutine[Any, Any, T], seconds: float) -> T:
    """What a read gives. Raises TimeoutError when nothing came in `seconds` during which this loop would have seen it.

    A loop that was held up itself, by a busy machine, looks once more before it believes that others were silent.
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


async def _only(message: pb.Weights) -> AsyncIterator[pb.Weights]:
    yield message


async def _write_all(call: Any, outgoing: asyncio.Queue[AsyncIterator[pb.Weights]]) -> None:
    """Write the messages of one iterator after another; ends only with an error."""
    while True:
        async for message in await outgoing.get():
            await call.write(message)
