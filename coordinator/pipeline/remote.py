"""A pipeline of workers: frames out to stage 0, results back from the last stage, signals to all at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from coordinator.pipeline.stall_detector import Progress
from coordinator.planning.capacity import Capacity
from coordinator.workers.client import NOTICE_SHARE, WorkerClient
from proto import cluster_pb2 as pb
from proto.control import Cancel, Rollback, Signal
from proto.errors import ClusterError, DeadlineError, StaleEpochError, WorkerLostError
from proto.frame import Frame, decode, encode
from proto.rpc.data_plane import CHANNEL_OPTIONS, RESULTS, TOKEN_BYTES, StreamBinding
from proto.rpc.link import Link
from proto.rpc.status_codes import from_status

CLOSE_SECONDS = 5.0
"""Longest wait for what is under way to end; the next plan waits for it."""


class RemotePipeline:
    """Implements `coordinator.pipeline.base.Pipeline` over workers that have loaded their stages.

    `suspect`, once it has failed, is the address of the worker to leave out if all of them turn out to be alive.
    """

    def __init__(
        self,
        workers: Sequence[WorkerClient],
        epoch: int,
        capacity: Capacity,
        hop_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self.stages = len(workers)
        self.capacity = capacity
        self.workers = tuple(workers)
        self.hop_timeout = hop_timeout
        self.clock = clock
        self.suspect: str | None = None
        self.progress = Progress(self.stages)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._results: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._failure: ClusterError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, worker_ids: Sequence[str]) -> None:
        """Bind every stage into the plan, the last first, then open both ends of the data plane.

        Raises what the first refusal stands for.
        """
        me = self.workers[0].me
        for stage in reversed(range(self.stages)):
            last = stage == self.stages - 1
            # What goes wrong from here on is the hop to the next stage, or with the last one, itself.
            self.suspect = self.workers[min(stage + 1, self.stages - 1)].address
            await self.workers[stage].connect(
                pb.ConnectRequest(
                    coordinator=me,
                    epoch=self.epoch,
                    stage=stage,
                    num_stages=self.stages,
                    next_address="" if last else self.workers[stage + 1].address,
                    next_worker_id="" if last else worker_ids[stage + 1],
                    plan_token=self._token,
                    hop_timeout_ms=int(self.hop_timeout * 1000),
                )
            )
        self.suspect = self.workers[0].address
        self._channel = grpc.aio.insecure_channel(self.workers[-1].address, options=CHANNEL_OPTIONS)
        self._reader = asyncio.create_task(self._read(self._binding(self.stages - 1)))
        self._link = Link(
            self.workers[0].address,
            self._binding(0),
            timeout=self.hop_timeout,
            on_failure=lambda error: self._fail(error, self.workers[0].address),
        )
        await self._link.open()
        self.suspect = None

    def _binding(self, stage: int) -> StreamBinding:
        return StreamBinding(self.epoch, stage, self.workers[0].me.id, self._token)

    # ---- frames

    def send(self, frame: Frame) -> None:
        self._link.send(encode(frame))
        self.progress.send(self.clock())

    async def receive(self) -> Frame:
        result = await self._results.get()
        if isinstance(result, ClusterError):
            self._results.put_nowait(result)  # for every later call too
            raise result
        return result

    def fail(self, error: ClusterError) -> None:
        """See Pipeline. The first cause is the one told."""
        self._fail(error, None)

    def _fail(self, error: ClusterError, suspect: str | None) -> None:
        if self._failure is None:
            self._failure = error
            self.suspect = suspect
            self._results.put_nowait(error)

    def heard(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """A worker of this plan told where it stands: see whether its frames move."""
        now = self.clock()
        for stage, worker in enumerate(self.workers):
            if worker.address == address:
                self.progress.hear(
                    stage,
                    worker_status.frames_done,
                    worker_status.busy_us,
                    writing=worker_status.link_stall_ms > 0,
                    now=now,
                )
        still = self.progress.still
        if still > NOTICE_SHARE * self.hop_timeout:
            suspect = self.workers[min(self.progress.lost_before, self.stages - 1)].address
            lost = f"no frame has moved for {still:.1f} s, and {suspect} waits for one"
            self._fail(DeadlineError(lost), suspect)

    async def _read(self, binding: StreamBinding) -> None:
        address = self.workers[-1].address
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            RESULTS
        )
        call = method(b"", metadata=binding.to_metadata())
        try:
            async for data in call:
                self._take(decode(data))
            self._fail(WorkerLostError(f"{address} ended its results"), address)
        except grpc.aio.AioRpcError as error:
            details, trailing = error.details(), error.trailing_metadata()
            self._fail(from_status(error.code().name, details, trailing, address), address)
        except ClusterError as error:
            self._fail(error, address)

    def _take(self, frame: Frame) -> None:
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"a result of epoch {frame.epoch}, this plan is {self.epoch}")
        self.progress.take(self.clock())
        self._results.put_nowait(frame)

    # ---- signals

    def rollback(self, seq_id: int, window: int, accepted_length: int, trim: int) -> None:
        self._broadcast(Signal(self.epoch, Rollback(seq_id, window, accepted_length, trim)))

    def cancel(self, seq_id: int) -> None:
        self._broadcast(Signal(self.epoch, Cancel(seq_id)))

    def _broadcast(self, signal: Signal) -> None:
        for worker in self.workers:
            worker.signal(signal)

    async def close(self) -> None:
        """See Pipeline. Whoever gave it up and whoever used it may both close it."""
        if self._reader is None:
            return
        self._reader.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.wait({self._reader})
                await self._link.close()
                await self._channel.close()
