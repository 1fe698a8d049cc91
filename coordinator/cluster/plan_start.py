"""The start of a plan: new workers load while the plan in force serves, then all stages load and connect.

Workers that hold a stage together start processes for it first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from coordinator.cluster.discovery import on_this_machine
from coordinator.cluster.events import PlanPrepared, PreparationFailed
from coordinator.cluster.membership import ManagerOptions, Membership
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import View
from coordinator.pipeline.remote_pipeline import RemotePipeline
from coordinator.pipeline.worker_client import NOTICE_SHARE, WorkerClient
from coordinator.planning.capacity import Capacity
from coordinator.planning.plan import Plan, StagePlan
from mtp.device import FrameLimits
from proto import cluster_pb2 as pb
from proto.announcement import host_of, join_address
from proto.control import Backend
from proto.errors import ClusterError, NotReadyError, ProtocolError, WorkerLostError
from proto.frame import MAX_FRAME_TOKENS
from proto.rpc.listener import BackgroundTasks
from proto.rpc.status_codes import printable
from proto.terminal.progress import OnProgress, byte_bar

log = logging.getLogger(__name__)

MAX_LAYERS = 80
"""Characters of a worker's text about its layers."""

MAX_COLLECTIVE_US = 1e6
"""Microseconds. A second for one sum is no figure of a link that works."""

LEASE_TIMEOUTS = 3
"""Failure timeouts without a message after which a worker ends the lease of its coordinator."""

MAX_FAULT = 300
"""Characters of the fault message of a process in logs and errors."""

STARTING_SECONDS = 5.0
"""Seconds. Least silence that loses a process before its stage serves. MLX holds Python's lock while it joins a group:
its `ring` waits 1 s, and rarely 2 s more, for a member that listens a moment later."""

MEMBER_SECONDS = 75.0
"""Seconds. Bounds the start of a process for a group, for which the worker waits up to 60 s."""


class StartError(NotReadyError):
    """Failure to start a plan. `suspect` is the address of the worker to leave out, if one is known."""

    def __init__(self, reason: str, suspect: str | None) -> None:
        super().__init__(reason)
        self.suspect = suspect


def choose_backend(arithmetic: str, rdma: Sequence[str]) -> Backend:
    """Return the backend for equal machines. Each knows only one of the `rdma` devices, so jaccl joins pairs."""
    if arithmetic.startswith("cuda "):
        return Backend.nccl
    return Backend.jaccl if len(rdma) == 2 and all(rdma) else Backend.ring


@dataclass(eq=False)
class GroupStart:
    """The processes of one plan. They end when their clients are closed, because their leases end."""

    me: pb.Coordinator
    epoch: int
    failure_timeout: float
    lease_ms: int

    def __post_init__(self) -> None:
        self._replies: dict[str, pb.MemberReply] = {}
        """The address at which each member accepts the others, and its RDMA device, by the address of its worker."""
        self.clients: list[WorkerClient] = []
        self.pipeline: RemotePipeline | None = None
        """The pipeline that gets the statuses of the processes, once there is one."""
        self._background = BackgroundTasks()

    async def start(self, stages: Sequence[Sequence[WorkerClient]]) -> list[list[WorkerClient]]:
        """Start a process on every worker, and return their clients in the same places. Raises StartError."""
        workers = [worker for members in stages for worker in members]
        starts = [asyncio.create_task(self._start_one(worker)) for worker in workers]
        try:
            clients = iter(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        return [[next(clients) for _ in members] for members in stages]

    async def _start_one(self, worker: WorkerClient) -> WorkerClient:
        request = pb.MemberRequest(coordinator=self.me, epoch=self.epoch, lease_ms=self.lease_ms)
        try:
            reply = await worker.call(worker.stub.StartMember, request, MEMBER_SECONDS)
        except ClusterError as error:
            raise StartError(str(error), worker.owner) from error
        address = join_address(host_of(worker.address), reply.port)
        client = WorkerClient(address, self.me, worker.trust, worker.node, worker.owner)
        self._replies[worker.owner] = reply
        client.starting_seconds = STARTING_SECONDS
        self.clients.append(client)
        worker.member = client
        on_status = partial(self._receive_status, client)
        client.watch(self.failure_timeout, on_status, partial(self._record_loss, client))
        return client

    def seat(self, members: Sequence[WorkerClient], rank: int, arithmetic: str) -> pb.Group:
        """Return the place of one of the `members` of a stage, which have equal `arithmetic`."""
        replies = [self._replies[member.owner] for member in members]
        hosts, rdma = [one.group_address for one in replies], [one.rdma for one in replies]
        backend = choose_backend(arithmetic, rdma)
        return pb.Group(rank=rank, hosts=hosts, backend=backend.value, rdma=rdma)

    def serve(self, pipeline: RemotePipeline) -> None:
        """Let `pipeline` have the processes, whose stages are loaded, and close their clients at its end."""
        self.pipeline, pipeline.owned = pipeline, tuple(self.clients)
        for client in self.clients:
            client.starting_seconds = 0.0

    async def close(self) -> None:
        """Close the clients, so that the processes end."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def _receive_status(self, client: WorkerClient, status: pb.WorkerStatus) -> None:
        pipeline = self.pipeline
        if status.engine_stall_ms / 1000 > NOTICE_SHARE * self.failure_timeout:
            self._record_loss(client, WorkerLostError("its engine is stuck"))
        elif pipeline is None or status.epoch != pipeline.epoch:
            return
        elif status.HasField("fault"):
            error = WorkerLostError(printable(status.fault.message, MAX_FAULT))
            pipeline.fail_member(client.owner, error, status.fault.peer)
        else:
            pipeline.record_worker_status(client.owner, status)

    def _record_loss(self, client: WorkerClient, error: ClusterError) -> None:
        """Fail the plan of a process that is lost. Its worker may be alive."""
        log.warning("process of a group lost", extra={"address": client.owner, "error": str(error)})
        if self.pipeline is not None:
            self.pipeline.fail_member(client.owner, error)
        else:  # ends the calls that wait for it
            client.failure = error
            self._background.spawn(client.close())


@dataclass
class LoadState:
    """Loads by worker address: bytes done and bytes in total, and how the loaded layers compute."""

    done: dict[str, tuple[int, int]] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    collectives: dict[str, float] = field(default_factory=dict)
    """Seconds of a sum of one row over the members of a group, as each member measured it."""

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes done and bytes in total, over all workers that reported progress."""
        return sum(d for d, _ in self.done.values()), sum(t for _, t in self.done.values())


@dataclass(eq=False)
class PlanStart:
    """One start of `plan` over the workers of `view`."""

    plan: Plan
    view: View
    model: ServedModel
    options: ManagerOptions
    membership: Membership
    loads: LoadState = field(default_factory=LoadState)

    def __post_init__(self) -> None:
        self.busy = workers_in_use(self.view, self.plan)
        """Addresses of the workers that load when the plan in force has ended."""
        self._frame_limits: list[FrameLimits] = []  # of the workers that have loaded

    async def run(self) -> RemotePipeline:
        """Load and connect all stages. Raises StartError, after a silent worker is recorded as lost."""
        room = self.model.capacity(self.plan)
        label = f"loading layers on {len(self.plan.nodes)} workers"
        timeout = self.options.failure_timeout
        stages = [[self._worker(node) for node in stage.nodes] for stage in self.plan.stages]
        for worker in chain.from_iterable(stages):
            worker.member = None
        group: GroupStart | None = None
        async with AsyncExitStack() as undo:
            if self.plan.group_size > 1:
                group = GroupStart(self.options.me, self.plan.epoch, timeout, self._lease_ms)
                undo.push_async_callback(group.close)
                try:
                    stages = await group.start(stages)
                except StartError as error:
                    if error.suspect is not None:
                        await self.membership.probe(error.suspect)
                    raise
            await self._load_stages(label, room, self.plan.epoch, stages, group)
            spans = [stage.span for stage in self.plan.stages]
            pipeline = RemotePipeline(stages, self.plan.epoch, room, timeout, spans)
            undo.push_async_callback(pipeline.close)
            if group is not None:
                group.serve(pipeline)
            pipeline.frame_limits = FrameLimits.joint(self._frame_limits)
            ids = {node: self.view.members[node].worker_id for node in self.plan.nodes}
            try:
                await pipeline.open(ids)
            except ClusterError as error:
                await asyncio.gather(*(self.membership.probe(node) for node in self.plan.nodes))
                # If all workers are alive, the far end of the hop that failed is the suspect.
                raise StartError(str(error), pipeline.suspect) from error
            undo.pop_all()
        return pipeline

    async def prepare(self, workers: frozenset[str]) -> PlanPrepared | PreparationFailed:
        """Load the stages of new workers, and return what happened. `workers` are all of the plan, by id.

        Busy workers only fetch. New ones enter the epoch in force.
        """
        try:
            room = self.model.capacity(self.plan)
            label = "loading layers for the next plan"
            stages = [[self._worker(node) for node in stage.nodes] for stage in self.plan.stages]
            await self._load_stages(label, room, self.view.epoch, stages, busy=self.busy)
        except Exception as error:
            reason, suspect = describe_failure(error)
            log.warning("the plan stays: the next one could not load", extra={"error": reason})
            return PreparationFailed(workers, reason, suspect)
        return PlanPrepared(workers)

    async def _load_stages(
        self,
        label: str,
        room: Capacity,
        epoch: int,
        stages: Sequence[Sequence[WorkerClient]],
        group: GroupStart | None = None,
        busy: Collection[str] = (),
    ) -> None:
        """Load all stages concurrently. If one fails, cancel the others. Workers in `busy` only fetch."""
        places = [
            (stage, workers, rank, self._request(stage, room, epoch))
            for stage, workers in zip(self.plan.stages, stages, strict=True)
            for rank in range(len(workers))
        ]
        with byte_bar(label, log) as show:
            if group is not None:  # members wait for each other when they load
                await _all([partial(self._fetch, ws[i], asked, show) for _, ws, i, asked in places])
            steps = []
            for stage, workers, rank, request in places:
                step = self._fetch if workers[rank].owner in busy else self._fetch_and_load
                if group is not None:
                    arithmetic = self.view.members[stage.node].arithmetic
                    request.group.CopyFrom(group.seat(workers, rank, arithmetic))
                    step = self._load
                steps.append(partial(step, workers[rank], request, show))
            await _all(steps)

    def _worker(self, address: str) -> WorkerClient:
        worker = self.membership.clients.get(address)
        if worker is None:
            raise StartError(f"the worker at {address} is leaving", None)
        return worker

    def _request(self, stage: StagePlan, room: Capacity, epoch: int) -> pb.LoadRequest:
        request = pb.LoadRequest(
            coordinator=self.options.me,
            epoch=epoch,
            model=self.model.ref,
            span=pb.Span(start=stage.span.start, end=stage.span.end),
            first=stage.first,
            last=stage.last,
            limits=pb.Limits(max_sequences=room.sequences, kv_tokens=room.kv_tokens, prefix_bytes=room.prefix_bytes),
            lease_ms=self._lease_ms,
        )
        self.model.options.write_to(request)
        return request

    async def _fetch_and_load(self, worker: WorkerClient, request: pb.LoadRequest, show: OnProgress) -> None:
        await self._fetch(worker, request, show)
        await self._load(worker, request, show)

    async def _load(self, worker: WorkerClient, request: pb.LoadRequest, show: OnProgress) -> None:
        try:
            progress = partial(self._record_progress, worker.owner, show)
            result = await worker.load(request, progress)
            self.loads.layers[worker.owner] = printable(result.layers, MAX_LAYERS)
            if 0 < result.collective_us < MAX_COLLECTIVE_US:
                self.loads.collectives[worker.owner] = result.collective_us / 1e6
            longest, shortest = result.longest_chunk, result.shortest_chunk
            if not 0 < shortest <= longest <= MAX_FRAME_TOKENS:
                raise ProtocolError(f"invalid chunks of {shortest} to {longest} tokens")
            self._frame_limits.append(FrameLimits(longest, shortest))
        except ClusterError as error:
            raise await self._start_error(worker, error) from error

    async def _fetch(self, worker: WorkerClient, request: pb.LoadRequest, show: OnProgress) -> None:
        """Provide the weights that the worker lacks, which it writes to its disk."""
        if self.view.members[worker.owner].has_files:
            return
        try:
            progress = partial(self._record_progress, worker.owner, show)
            await self.model.provider.provide_weights(self._worker(worker.owner), request, progress)
        except ClusterError as error:
            raise await self._start_error(worker, error) from error

    def _record_progress(self, owner: str, show: OnProgress, done: int, total: int) -> None:
        self.loads.done[owner] = (done, total)
        show(*self.loads.totals)

    async def _start_error(self, worker: WorkerClient, error: ClusterError) -> StartError:
        """Return the error of a worker, which is the suspect if it answers. Otherwise it is recorded as lost."""
        await self.membership.probe(worker.owner)
        return StartError(str(error), worker.owner)

    @property
    def _lease_ms(self) -> int:
        """Milliseconds without a message after which a worker ends the lease of its coordinator."""
        least = STARTING_SECONDS if self.plan.group_size > 1 else 0.0
        return int(LEASE_TIMEOUTS * max(least, self.options.failure_timeout) * 1000)


def describe_failure(error: Exception) -> tuple[str, str | None]:
    """Return why a plan could not start, and the worker to leave out, if known. Another error is a bug, and logged."""
    if isinstance(error, ClusterError):
        return str(error), error.suspect if isinstance(error, StartError) else None
    log.error("a plan could not start", exc_info=error)
    return f"{type(error).__name__}: {error}", None


def workers_in_use(view: View, plan: Plan) -> frozenset[str]:
    """Return the nodes of `plan` whose memory is in use now, so that they load when the plan in force has ended."""
    if plan.group_size > 1:
        return frozenset(plan.nodes)
    if view.serving:
        return frozenset(view.serving)
    return frozenset(node for node in plan.nodes if on_this_machine(node))


async def _all(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run `steps` at once. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(step()) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
