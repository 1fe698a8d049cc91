"""The pipeline over workers, which carries frames and signals, and a detector that finds where frames are lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc
import grpc.aio

from coordinator.pipeline.pipeline import Move, Pipeline, prefix_with_moves
from coordinator.pipeline.worker_client import NOTICE_SHARE, WorkerClient
from coordinator.planning.capacity import Capacity
from coordinator.status.frame_trace import COORDINATOR, ProcessTrace, process_trace
from mtp.device import FrameLimits
from proto import cluster_pb2 as pb
from proto.backup import LayerState, ReceivedStates, prefix_key
from proto.control import Rollback
from proto.errors import ClusterError, DeadlineError, ProtocolError, StaleEpochError
from proto.frame import Frame, decode, encode
from proto.frame_stamps import CoordinatorStep, StampRing
from proto.rpc.channels import open_channel
from proto.rpc.data_connection import RESULTS, TOKEN_BYTES, StreamBinding
from proto.rpc.link import Link, LoopFrameReader, end_of_connection, open_connection
from proto.span import Span


@dataclass
class StageProgress:
    """The last report of a stage: its frames in this plan, and its counter of busy microseconds."""

    frames: int = 0
    busy_us: int = 0
    reported_at: float = 0.0
    """Seconds, in the caller's clock."""
    awaits_tokens: bool = False
    """A frame waits there for tokens that the last stage relays, so no hop lost it."""


@dataclass
class StallDetector:
    """The progress of the frames of one plan over `stages` stages.

    Other code watches a stage that computes and a hop that is being written. Both count as movement here. The detector
    finds the remaining case: a hop loses a frame although no stream breaks and every worker is alive.
    """

    stages: int
    sent: int = 0
    returned: int = 0
    moved_at: float = 0.0
    _stages: list[StageProgress] = field(init=False)

    def __post_init__(self) -> None:
        self._stages = [StageProgress() for _ in range(self.stages)]

    def record_sent(self, now: float) -> None:
        """Record a frame sent to stage 0."""
        if self.sent == self.returned:
            self.moved_at = now
        self.sent += 1

    def record_returned(self, now: float) -> None:
        """Record a frame returned by the last stage."""
        self.returned += 1
        self.moved_at = now

    def record_stage(
        self,
        stage: int,
        frames: int,
        busy_us: int,
        *,
        writing: bool,
        now: float,
        awaits_tokens: bool = False,
    ) -> None:
        """Record a stage's report. `writing` says that the stage is writing a frame to the next one."""
        before = self._stages[stage]
        if writing or (frames, busy_us) != (before.frames, before.busy_us):
            self.moved_at = now
        self._stages[stage] = StageProgress(frames, busy_us, now, awaits_tokens)

    @property
    def stalled_seconds(self) -> float:
        """Seconds without movement while frames are in flight, confirmed by a report of every stage."""
        if self.sent == self.returned:
            return 0.0
        return max(0.0, min(stage.reported_at for stage in self._stages) - self.moved_at)

    @property
    def losing_hop(self) -> int:
        """The first hop to a stage with fewer frames than the one before, or `stages` for hops of the last stage."""
        before = self.sent
        for number, stage in enumerate(self._stages):
            if stage.frames < before and not stage.awaits_tokens:
                return number
            before = stage.frames
        return self.stages


MOST_MOVES = 64
"""Prefixes that were found on several disks and may still be loaded."""

CLOSE_SECONDS = 5.0
"""Seconds. Maximum wait for open calls to end. The next plan starts after it."""


@dataclass(eq=False)
class RemotePipeline(Pipeline):
    """A `Pipeline` over workers. `members[stage]` hold a stage together, and the first receives its frames."""

    members: Sequence[Sequence[WorkerClient]]
    epoch: int
    capacity: Capacity
    hop_timeout: float
    spans: Sequence[Span]

    def __post_init__(self) -> None:
        self.stages = len(self.members)
        self.workers = tuple(workers[0] for workers in self.members)
        """The first worker of each stage."""
        self._owners: dict[str, str] = {}  # addresses of workers by their ids
        self.owned: tuple[WorkerClient, ...] = ()
        """Clients that end with this plan."""
        self.suspect: str | None = None
        self.makes_backups = True
        self._moves: dict[bytes, list[Move]] = {}
        """By the key of a prefix that was found and is not loaded yet."""
        self.frame_limits = FrameLimits()
        self.stall_detector = StallDetector(self.stages)
        self.stamps = StampRing()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._results: asyncio.Queue[Frame | ClusterError] = asyncio.Queue()
        self._failure: ClusterError | None = None
        self._reader: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._link: Link | None = None

    async def open(self, worker_ids: Mapping[str, str]) -> None:
        """Bind the stages of `worker_ids` (by address), last to first, and open the data plane. Raises ClusterError."""

        def peer_of(receiver: WorkerClient) -> pb.Peer:
            worker_id = worker_ids[receiver.owner]
            return pb.Peer(address=receiver.address, worker_id=worker_id, node=receiver.node)

        self._owners = {worker_id: address for address, worker_id in worker_ids.items()}
        for stage in reversed(range(self.stages)):
            following = self.workers[min(stage + 1, self.stages - 1)]
            # A failure from here on is one of the hop to the next stage, or of the last stage itself.
            self.suspect = following.owner
            await self._connect_members(stage)
            previous = "" if self.stages == 1 else self.workers[stage - 1].node
            request = self._connect_request(stage, previous)
            request.members.extend(map(peer_of, self.members[stage][1:]))
            if stage < self.stages - 1:
                request.next.CopyFrom(peer_of(following))
            await self.workers[stage].connect(request)
        first, timeout_ms = self.workers[0], int(self.hop_timeout * 1000)
        self.suspect = first.owner
        if self.stages > 1:
            ring = pb.RingRequest(coordinator=first.me, epoch=self.epoch, hop_timeout_ms=timeout_ms)
            ring.first.CopyFrom(peer_of(first))
            last = self.workers[-1]
            await last.call(last.stub.ConnectRing, ring)
        await self._open_results(self._binding(self.stages - 1))
        self._link = Link(
            first.address,
            self._binding(0),
            timeout=self.hop_timeout,
            on_failure=lambda error: self._fail(error, first.owner),
            trust=first.trust,
            node=first.node,
        )
        await self._link.open()
        self.suspect = None

    async def _connect_members(self, stage: int) -> None:
        """Bind the members of a group that follow its first one, which sends them its frames."""
        first, *others = self.members[stage]
        for rank, member in enumerate(others, start=1):
            suspect, self.suspect = self.suspect, member.owner
            await member.connect(self._connect_request(stage, first.node, rank))
            self.suspect = suspect

    def _connect_request(self, stage: int, previous: str, rank: int = 0) -> pb.ConnectRequest:
        """Return the request that binds a stage, whose frames the node `previous` sends, into the plan."""
        return pb.ConnectRequest(
            coordinator=self.workers[0].me,
            epoch=self.epoch,
            stage=stage,
            num_stages=self.stages,
            plan_token=self._token,
            hop_timeout_ms=int(self.hop_timeout * 1000),
            previous_node=previous,
            rank=rank,
        )

    def _binding(self, stage: int) -> StreamBinding:
        return StreamBinding(self.epoch, stage, self._token)

    # ---- frames

    def send_frame(self, frame: Frame) -> None:
        stamps = self.stamps.add_frame(COORDINATOR, CoordinatorStep)
        stamps.name_frame(frame.epoch, frame.number, frame.rows)
        data = encode(frame)
        stamps.mark(CoordinatorStep.ENCODED)
        assert self._link is not None, "the pipeline is open"
        self._link.send(data, partial(stamps.mark, CoordinatorStep.WRITTEN))
        self.stall_detector.record_sent(time.monotonic())

    async def receive_frame(self) -> Frame:
        result = await self._results.get()
        if isinstance(result, ClusterError):
            self._results.put_nowait(result)  # every later call raises it too
            raise result
        return result

    def fail(self, error: ClusterError) -> None:
        self._fail(error, None)

    def fail_member(self, address: str, error: ClusterError, peer: str = "") -> None:
        """Fail because of the process of the worker at `address`, or of `peer`, the far end of its lost link."""
        self._fail(error, self._owners.get(peer, address))

    def _fail(self, error: ClusterError, suspect: str | None) -> None:
        if self._failure is None:
            self._failure = error
            self.suspect = suspect
            self._results.put_nowait(error)

    def record_worker_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """Record the progress of a worker of this plan, and fail if the frames in flight do not move."""
        now = time.monotonic()
        for stage, worker in enumerate(self.workers):
            if worker.owner == address:
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
            suspect = self.workers[min(self.stall_detector.losing_hop, self.stages - 1)].owner
            message = f"no frame has moved for {stalled:.1f} s, and {suspect} waits for one"
            self._fail(DeadlineError(message), suspect)

    async def _open_results(self, binding: StreamBinding) -> None:
        """Open the connection of the results. Raises the last stage's refusal, or DeadlineError."""
        worker = self.workers[-1]
        channel = open_channel(worker.address, worker.trust, worker.node)
        self._channel = channel
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(RESULTS)
        call = method(b"", metadata=binding.to_metadata())
        connection, worker.hop = await open_connection(
            call, worker.address, worker.trust, worker.node, self.hop_timeout
        )
        reader = LoopFrameReader(connection, self._queue_result)
        self._reader = asyncio.create_task(self._watch_results(call, reader))

    async def _watch_results(self, call: grpc.aio.UnaryStreamCall[bytes, bytes], reader: LoopFrameReader) -> None:
        """Fail when the results end: by the status of the call, or by an invalid frame."""
        worker = self.workers[-1]
        try:
            self._fail(await end_of_connection(call, worker.address, reader.ended), worker.owner)
        finally:
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
        self.stall_detector.record_returned(time.monotonic())
        self._results.put_nowait(frame)

    async def collect_trace(self, window_ns: int) -> list[ProcessTrace]:
        since_ns = self.stamps.newest_ns() - window_ns
        own = process_trace("coordinator", COORDINATOR, self.stamps.since(since_ns))
        calls = (w.collect_trace(i, self.epoch, since_ns) for i, w in enumerate(self.workers))
        return [own, *await asyncio.gather(*calls)]

    # ---- backups and prefixes on disk

    @property
    def _all_workers(self) -> list[WorkerClient]:
        """The workers of all stages, with all members of groups."""
        return [worker for members in self.members for worker in members]

    @property
    def has_disk(self) -> bool:
        return all(worker.has_disk for worker in self._all_workers)

    async def read_backup(self, seq_id: int, limit: int) -> ReceivedStates:
        calls = (worker.read_backup(self.epoch, seq_id, limit) for worker in self._all_workers)
        found = await asyncio.gather(*calls)
        lengths = {one.tokens for one in found}
        if len(lengths) != 1:
            raise ProtocolError(f"the backups of sequence {seq_id} have {sorted(lengths)} tokens")
        states = [state for one in found for state in one.states]
        return ReceivedStates(lengths.pop(), states, max(one.seconds for one in found))

    async def write_backup(self, seq_id: int, tokens: Sequence[int], states: Sequence[LayerState]) -> None:
        pairs = zip(self.members, self._parts(states), strict=True)
        calls = (worker.write_backup(self.epoch, seq_id, tokens, part) for workers, part in pairs for worker in workers)
        await _wait_for_all(calls)

    async def find_prefix(self, tokens: Sequence[int]) -> int:
        calls = (worker.find_prefix(self.epoch, tokens) for worker in self._all_workers)
        found, moves = prefix_with_moves(await asyncio.gather(*calls))
        if moves:
            self._moves[prefix_key(tokens[:found])] = moves
            while len(self._moves) > MOST_MOVES:
                del self._moves[next(iter(self._moves))]
        return found

    async def load_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        workers = self._all_workers
        # They move again for every sequence, until the stages have written the prefix of a longer prompt themselves.
        moves = self._moves.pop(prefix_key(tokens), ())
        await _wait_for_all(
            workers[move.target].copy_states(workers[move.source], self.epoch, seq_id, tokens, move.layers)
            for move in moves
        )
        calls = (worker.load_prefix(self.epoch, seq_id, tokens) for worker in self._all_workers)
        await _wait_for_all(calls)

    def _parts(self, states: Sequence[LayerState]) -> list[list[LayerState]]:
        """Return the states of each stage. The last stage also gets that of the MTP head."""
        ends = [*(span.end for span in self.spans[:-1]), self.spans[-1].end + 1]
        bounds = [(span.start, end) for span, end in zip(self.spans, ends, strict=True)]
        return [[one for one in states if start <= one.layer < end] for start, end in bounds]

    # ---- signals

    def broadcast_rollback(self, rollback: Rollback) -> None:
        self._broadcast(rollback.to_signal(self.epoch))

    def broadcast_cancel(self, seq_id: int) -> None:
        self._broadcast(pb.Signal(epoch=self.epoch, cancel=pb.Cancel(seq_id=seq_id)))

    def _broadcast(self, signal: pb.Signal) -> None:
        for worker in self.workers:  # the other members of a group follow the first one
            worker.send_signal(signal)

    async def close(self) -> None:
        """Close the streams. Both the source and the loop may call it, in any order."""
        # The processes of groups end when their clients close, which takes a second at most.
        await asyncio.gather(*(client.close() for client in self.owned))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._reader is not None:
                    self._reader.cancel()
                    await asyncio.wait({self._reader})
                if self._link is not None:
                    await self._link.close()
                if self._channel is not None:
                    await self._channel.close()


async def _wait_for_all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait until all `calls` have ended, so that none arrives later. Raise the first error."""
    for found in await asyncio.gather(*calls, return_exceptions=True):
        if found is not None:
            raise found


def _check_outcomes(frame: Frame) -> None:
    """Raise ProtocolError unless the last stage gave a token for every segment that asked for one."""
    asked = {(s.seq_id, s.window) for s in frame.segments if s.sample and not s.cancelled}
    for outcome in frame.outcomes:
        no_token = outcome.token is None and not outcome.cancelled
        key = (outcome.seq_id, outcome.window)
        if key in asked and no_token and outcome.accepted_length:
            raise ProtocolError(f"the last stage gave no token for sequence {outcome.seq_id}")
