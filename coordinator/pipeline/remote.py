"""The pipeline over workers: frames go to stage 0, results come from the last stage, signals go to all workers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from coordinator.frame_trace.process_trace import COORDINATOR, ProcessTrace, process_trace
from coordinator.pipeline.stall_detector import StallDetector
from coordinator.planning.capacity import Capacity
from coordinator.workers.client import NOTICE_SHARE, WorkerClient
from proto import cluster_pb2 as pb
from proto.backup import LayerState, ReceivedStates
from proto.control import Cancel, Rollback, Signal
from proto.errors import (
    ClusterError,
    DeadlineError,
    ProtocolError,
    StaleEpochError,
    WorkerLostError,
)
from proto.frame import Frame, decode, encode
from proto.frame_stamps import CoordinatorStep, StampRing
from proto.rpc.channels import open_channel
from proto.rpc.data_plane import RESULTS, TOKEN_BYTES, StreamBinding, ticket_in
from proto.rpc.data_socket import dial
from proto.rpc.frame_reader import LoopFrameReader
from proto.rpc.link import Link
from proto.rpc.status_codes import from_status
from proto.span import Span
from proto.trust.identity import Role

CLOSE_SECONDS = 5.0
"""Seconds. Maximum wait for open calls to end. The next plan starts after it."""


class RemotePipeline:
    """The implementation of `coordinator.pipeline.base.Pipeline` over workers that have loaded their stages."""

    def __init__(
        self,
        workers: Sequence[WorkerClient],
        epoch: int,
        capacity: Capacity,
        hop_timeout: float,
        spans: Sequence[Span],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self.stages = len(workers)
        self.capacity = capacity
        self.workers = tuple(workers)
        self.hop_timeout = hop_timeout
        self.spans = tuple(spans)
        self.clock = clock
        self.suspect: str | None = None
        self.makes_backups = True
        self.stall_detector = StallDetector(self.stages)
        self.stamps = StampRing()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._results: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._failure: ClusterError | None = None
        self._reader: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._link: Link | None = None

    async def open(self, worker_ids: Sequence[str]) -> None:
        """Bind every stage into the plan, the last one first, then open both ends of the data plane.

        Raises the ClusterError of the first refusal. `suspect` is then the worker at the far end of the failed hop.
        """
        me = self.workers[0].me
        for stage in reversed(range(self.stages)):
            last = stage == self.stages - 1
            # A failure from here on is one of the hop to the next stage, or of the last stage itself.
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
                    previous_node="" if self.stages == 1 else self.workers[stage - 1].node,
                    next_node="" if last else self.workers[stage + 1].node,
                )
            )
        self.suspect = self.workers[0].address
        if self.stages > 1:
            await self.workers[-1].connect_ring(
                pb.RingRequest(
                    coordinator=me,
                    epoch=self.epoch,
                    first_address=self.workers[0].address,
                    first_worker_id=worker_ids[0],
                    first_node=self.workers[0].node,
                    hop_timeout_ms=int(self.hop_timeout * 1000),
                )
            )
        await self._open_results(self._binding(self.stages - 1))
        self._link = Link(
            self.workers[0].address,
            self._binding(0),
            timeout=self.hop_timeout,
            on_failure=lambda error: self._fail(error, self.workers[0].address),
            trust=self.workers[0].trust,
            node=self.workers[0].node,
        )
        await self._link.open()
        self.suspect = None

    def _binding(self, stage: int) -> StreamBinding:
        return StreamBinding(self.epoch, stage, self.workers[0].me.id, self._token)

    # ---- frames

    def send_frame(self, frame: Frame) -> None:
        """Queue a frame for stage 0. See Pipeline."""
        stamps = self.stamps.add_frame(COORDINATOR, CoordinatorStep)
        stamps.name_frame(frame.epoch, frame.number, frame.rows)
        data = encode(frame)
        stamps.mark(CoordinatorStep.ENCODED)
        assert self._link is not None, "the pipeline is open"
        self._link.send(data, partial(stamps.mark, CoordinatorStep.WRITTEN))
        self.stall_detector.record_sent(self.clock())

    async def receive_frame(self) -> Frame:
        """Wait for the next frame from the last stage and return it. See Pipeline."""
        result = await self._results.get()
        if isinstance(result, ClusterError):
            self._results.put_nowait(result)  # every later call raises it too
            raise result
        return result

    def fail(self, error: ClusterError) -> None:
        """Make `receive_frame` raise `error`, unless the pipeline has failed before."""
        self._fail(error, None)

    def _fail(self, error: ClusterError, suspect: str | None) -> None:
        if self._failure is None:
            self._failure = error
            self.suspect = suspect
            self._results.put_nowait(error)

    def record_worker_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """Record the progress of a worker of this plan, and fail if the frames in flight do not move."""
        now = self.clock()
        for stage, worker in enumerate(self.workers):
            if worker.address == address:
                self.stall_detector.record_stage(
                    stage,
                    worker_status.frames_done,
                    worker_status.busy_us,
                    writing=worker_status.link_stall_ms > 0,
                    now=now,
                    awaits_tokens=stage == 0 and worker_status.awaits_tokens,
                )
        stalled = self.stall_detector.stalled_seconds
        if stalled > NOTICE_SHARE * self.hop_timeout:
            suspect = self.workers[min(self.stall_detector.losing_hop, self.stages - 1)].address
            message = f"no frame has moved for {stalled:.1f} s, and {suspect} waits for one"
            self._fail(DeadlineError(message), suspect)

    async def _open_results(self, binding: StreamBinding) -> None:
        """Open the connection of the results. Raises the last stage's refusal, or DeadlineError."""
        worker = self.workers[-1]
        self._channel = open_channel(worker.address, worker.trust, Role.WORKER, worker.node)
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            RESULTS
        )
        call = method(b"", metadata=binding.to_metadata())
        try:
            async with asyncio.timeout(self.hop_timeout):
                metadata = await call.initial_metadata()
                if call.done():  # refused: the worker sent a status instead
                    raise await _error_of(call, worker.address)
        except TimeoutError:
            raise DeadlineError(
                f"opening the results of {worker.address} timed out after {self.hop_timeout:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise await _error_of(call, worker.address) from error
        ticket = ticket_in(metadata)
        connection, worker.hop = await asyncio.to_thread(
            dial, worker.address, worker.trust, worker.node, ticket, self.hop_timeout
        )
        reader = LoopFrameReader(connection, self._queue_result)
        self._reader = asyncio.create_task(self._watch_results(call, reader))

    async def _watch_results(
        self, call: grpc.aio.UnaryStreamCall[bytes, bytes], reader: LoopFrameReader
    ) -> None:
        """Fail when the results end: by the status of the call, or by an invalid frame."""
        address = self.workers[-1].address
        status = asyncio.create_task(_error_of(call, address))
        try:
            both: set[asyncio.Future[Any]] = {status, reader.ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if reader.ended.done() and (error := reader.ended.exception()) is not None:
                assert isinstance(error, ClusterError)
                self._fail(error, address)
                return
            # A worker that ends its results closes both. Its status says why.
            await asyncio.wait({status}, timeout=CLOSE_SECONDS)
            lost = WorkerLostError(f"{address} ended its results")
            self._fail(status.result() if status.done() else lost, address)
        finally:
            status.cancel()
            reader.close()
            call.cancel()

    def _queue_result(self, data: bytes | bytearray) -> None:
        received_ns = time.monotonic_ns()
        frame = decode(data)
        if stamps := self.stamps.find_frame(frame.epoch, frame.number):
            stamps.times[CoordinatorStep.RECEIVED] = received_ns
            stamps.mark(CoordinatorStep.DECODED)
        if frame.epoch != self.epoch:
            raise StaleEpochError(f"a result of epoch {frame.epoch}, this plan is {self.epoch}")
        _check_outcomes(frame)
        self.stall_detector.record_returned(self.clock())
        self._results.put_nowait(frame)

    async def collect_trace(self, since_ns: int) -> list[ProcessTrace]:
        """Return the traces of the coordinator and of all workers. See Pipeline."""
        own = process_trace("coordinator", COORDINATOR, self.stamps.since(since_ns))
        found = await asyncio.gather(
            *(
                worker.collect_trace(stage, self.epoch, since_ns)
                for stage, worker in enumerate(self.workers)
            )
        )
        return [own, *found]

    # ---- backups

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        """Return the newest backup of a sequence. See Pipeline."""
        found = await asyncio.gather(
            *(worker.read_backup(self.epoch, seq_id, limit) for worker in self.workers)
        )
        lengths = {one.tokens for one in found}
        if len(lengths) != 1:
            raise ProtocolError(f"the backups of sequence {seq_id} have {sorted(lengths)} tokens")
        states = [state for one in found for state in one.states]
        return ReceivedStates(lengths.pop(), states, max(one.seconds for one in found))

    async def write_backup(
        self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]
    ) -> None:
        """Give every stage its part of a backup. See Pipeline."""
        await asyncio.gather(
            *(
                worker.write_backup(self.epoch, seq_id, tokens, part)
                for worker, part in zip(self.workers, self._parts(states), strict=True)
            )
        )

    def _parts(self, states: Sequence[LayerState]) -> list[list[LayerState]]:
        """Return the states of each stage. The last stage also gets that of the MTP head."""
        ends = [*(span.end for span in self.spans[:-1]), self.spans[-1].end + 1]
        return [
            [state for state in states if span.start <= state.layer < end]
            for span, end in zip(self.spans, ends, strict=True)
        ]

    # ---- signals

    def broadcast_rollback(self, rollback: Rollback) -> None:
        """Send a rollback to every worker at once."""
        self._broadcast(Signal(self.epoch, rollback))

    def broadcast_cancel(self, seq_id: int) -> None:
        """Tell every worker at once that a sequence has no client any more."""
        self._broadcast(Signal(self.epoch, Cancel(seq_id)))

    def _broadcast(self, signal: Signal) -> None:
        for worker in self.workers:
            worker.send_signal(signal)

    async def close(self) -> None:
        """Close the streams. Both the source and the loop may call it, in any order."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._reader is not None:
                    self._reader.cancel()
                    await asyncio.wait({self._reader})
                if self._link is not None:
                    await self._link.close()
                if self._channel is not None:
                    await self._channel.close()


async def _error_of(call: grpc.aio.UnaryStreamCall[bytes, bytes], address: str) -> ClusterError:
    """Wait for a call to end, and return the error of its status."""
    code = await call.code()
    details, trailing = await call.details(), await call.trailing_metadata()
    return from_status(code.name, details, trailing, address)


def _check_outcomes(frame: Frame) -> None:
    """Raise ProtocolError unless the last stage gave a token for every segment that asked for one."""
    asked = {(s.seq_id, s.window) for s in frame.segments if s.sample and not s.cancelled}
    for outcome in frame.outcomes:
        key = (outcome.seq_id, outcome.window)
        if (
            key in asked
            and outcome.token is None
            and not outcome.cancelled
            and outcome.accepted_length
        ):
            raise ProtocolError(f"the last stage gave no token for sequence {outcome.seq_id}")
