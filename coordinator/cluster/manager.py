"""The edge of the cluster: watches workers, tells the view what happens, and carries out what is decided.

All decisions are `decide.decide`'s and all state is the view; here are the sockets, the tasks and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.budget import Capacity
from coordinator.cluster.decide import Action, GiveUp, Keep, Serve, ServeAlone, decide
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import (
    Draining,
    Ended,
    Event,
    Gathering,
    Kept,
    Left,
    Lost,
    Member,
    MemberState,
    Phase,
    PlanFailed,
    Refused,
    ReplanAsked,
    Seen,
    Serving,
    Settings,
    Starting,
    Tick,
    View,
    apply,
)
from coordinator.discovery import Candidate, Discovery
from coordinator.model_costs import REFERENCE_BANDWIDTH
from coordinator.pipeline import Pipeline
from coordinator.plan import Plan, StagePlan
from coordinator.remote import RemotePipeline
from coordinator.worker_client import DESCRIBE_SECONDS, WorkerClient
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, NotReadyError, WorkerLostError
from proto.span import Span

log = logging.getLogger(__name__)

LEASE_TIMEOUTS = 3
"""Failure timeouts without a word after which a worker takes its coordinator for gone."""

TICK_SECONDS = 0.1
POLL_SECONDS = 1.0
"""How often an address that is not a ready worker is asked again."""

PROBE_SECONDS = 1.0
"""How long a worker may take to show that it lives, after a plan failed and nobody knows whose fault it is."""

LINK_SECONDS = 1e-4
"""A hop, for the planner, until measured: what a gRPC stream on a local network was seen to take."""


@dataclass(frozen=True)
class ManagerOptions:
    """`failure_timeout`: seconds of silence, of a hop that takes nothing, or of an engine that does nothing, that
    make a worker lost. `addresses` are asked whether or not anyone announces them; `mdns` looks for others."""

    me: pb.Coordinator
    settings: Settings
    addresses: tuple[str, ...] = ()
    mdns: bool = False
    failure_timeout: float = 3.0


@dataclass
class LoadState:
    """How far each worker of the plan being loaded is: bytes done and in all, by address."""

    done: dict[str, tuple[int, int]] = field(default_factory=dict)


class ClusterManager:
    """Implements `coordinator.pipeline.PipelineSource` over workers, with this process as a last resort.

    `alone(epoch)` makes the pipeline of this process. `on_progress` hears of loads.
    """

    def __init__(
        self,
        model: ServedModel,
        options: ManagerOptions,
        alone: Callable[[int], Awaitable[Pipeline]],
        on_progress: Callable[[LoadState], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.options = options
        self.alone = alone
        self.on_progress = on_progress
        self.clock = clock
        self.view = View(options.settings, now=clock(), since=clock())
        self.clients: dict[str, WorkerClient] = {}
        self._joining: dict[str, Member] = {}
        """Workers that are watched and have not shown yet that they compute."""
        self.plan: Plan | None = None
        self.pipeline: Pipeline | None = None
        self.loads = LoadState()
        self._planner = model.planner(LINK_SECONDS)
        self._discovery = Discovery(options.addresses, mdns=options.mdns)
        self._asked: dict[str, float] = {}
        """When each candidate was last asked who it is."""
        self._waiting: asyncio.Future[Pipeline] | None = None
        self._start: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    def start(self) -> None:
        """Begin to look for workers."""
        self._spawn(self._ticks())

    def replan(self) -> None:
        """Use the workers there are as well as can be, though the present plan works."""
        self._happened(ReplanAsked())

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._start] if self._start else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._dismiss(a) for a in self.clients), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self.clients.values()))

    async def _dismiss(self, address: str) -> None:
        """Let a worker go: what it holds of our requests is of no use to anyone."""
        with contextlib.suppress(ClusterError):
            await asyncio.wait_for(self.clients[address].unload(self.view.epoch), PROBE_SECONDS)

    # ---- PipelineSource

    async def acquire(self) -> Pipeline:
        if self.view.phase is Phase.SERVING and self.pipeline is not None:
            return self.pipeline
        self._waiting = asyncio.get_running_loop().create_future()
        if self.view.phase is Phase.ENDED:
            self._happened(Gathering())
        return await self._waiting

    def failed(self, pipeline: Pipeline, error: Exception) -> None:
        if pipeline is self.pipeline:
            suspect = pipeline.suspect if isinstance(pipeline, RemotePipeline) else None
            self._broke(pipeline, str(error), suspect)

    def _broke(self, pipeline: Pipeline, reason: str, suspect: str | None) -> None:
        """The pipeline in force has failed; `suspect` is the worker to leave out next time, if all are alive."""
        self._drop_pipeline(reason)
        if self.view.phase is Phase.SERVING and self.view.epoch == pipeline.epoch:
            self._spawn(self._find_culprit(pipeline.epoch, reason, suspect))

    def _drop_pipeline(self, reason: str) -> None:
        """Whoever waits on the pipeline in force hears that it is void; nobody need have taken it to begin with."""
        if self.pipeline is not None:
            pipeline, self.pipeline = self.pipeline, None
            pipeline.fail(WorkerLostError(reason))
            self._spawn(pipeline.close())

    async def _find_culprit(self, epoch: int, reason: str, suspect: str | None) -> None:
        """Ask every worker of a failed plan whether it lives, so that the next plan leaves out those that do not."""
        await asyncio.gather(*(self._probe(address) for address in self.view.serving))
        self._happened(PlanFailed(epoch, reason, suspect))

    async def _probe(self, address: str) -> None:
        try:
            if address in self.clients:
                timeout = min(PROBE_SECONDS, self.options.failure_timeout)
                await self.clients[address].describe(timeout=timeout)
        except ClusterError as error:
            self._lost(address, error)

    # ---- events and actions

    def _happened(self, event: Event) -> None:
        before = self.view
        self.view = apply(before, event, self.clock())
        if not isinstance(event, Tick):
            log.debug("event", extra={"event": event})
        if before.phase is not self.view.phase:
            log.info(
                "cluster: %s",
                self.view.phase.value,
                extra={"epoch": self.view.epoch, "problem": self.view.problem},
            )
        if before.serving and not self.view.serving:
            self._stop_plan(self.view.problem)
        action = decide(self.view, self._planner)
        if action is not None:
            self._carry_out(action)

    def _stop_plan(self, reason: str) -> None:
        """The plan in force is void, whether it serves or starts."""
        if self._start is not None:
            self._start.cancel()
        self._drop_pipeline(reason)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Serve(plan):
                addresses = tuple(stage.node for stage in plan.stages)
                self._begin(plan.epoch, addresses, self._serve(plan))
            case ServeAlone(epoch):
                self._begin(epoch, (), self._serve_alone(epoch))
            case Keep(reason):
                log.info("the plan stays as it is", extra={"reason": reason})
                self._happened(Kept())
            case GiveUp(reason):
                self._happened(Ended(reason))
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_exception(NotReadyError(reason))

    def _begin(
        self, epoch: int, addresses: tuple[str, ...], work: Coroutine[Any, Any, None]
    ) -> None:
        self._stop_plan("the cluster is changing its plan")
        self._start = asyncio.create_task(work, name=f"start of epoch {epoch}")
        self._happened(Starting(epoch, addresses))

    async def _serve(self, plan: Plan) -> None:
        """Load and connect a plan, and give its pipeline to whoever waits."""
        try:
            workers = [self.clients[stage.node] for stage in plan.stages]
            self.loads = LoadState()
            room = self.model.capacity(plan)
            await _all(
                self._load(worker, stage, plan.epoch, room)
                for worker, stage in zip(workers, plan.stages, strict=True)
            )
            pipeline = RemotePipeline(
                workers,
                plan.epoch,
                room,
                self.options.failure_timeout,
            )
            await self._open(pipeline)
        except ClusterError as error:
            self._happened(PlanFailed(plan.epoch, str(error)))
        else:
            self.plan = plan
            self._serves(pipeline)

    async def _open(self, pipeline: RemotePipeline) -> None:
        """Connect the stages. A hop that cannot be opened is held against the far end, when that is alive."""
        ids = [self.view.members[worker.address].worker_id for worker in pipeline.workers]
        try:
            await pipeline.open(ids)
        except ClusterError as error:
            await pipeline.close()
            await asyncio.gather(*(self._probe(worker.address) for worker in pipeline.workers))
            self._happened(PlanFailed(pipeline.epoch, str(error), pipeline.suspect))
            raise
        except BaseException:
            await pipeline.close()
            raise

    async def _load(
        self, worker: WorkerClient, stage: StagePlan, epoch: int, room: Capacity
    ) -> pb.LoadResult:
        request = pb.LoadRequest(
            coordinator=self.options.me,
            epoch=epoch,
            model=self.model.ref,
            span=pb.Span(start=stage.span.start, end=stage.span.end),
            first=stage.first,
            last=stage.last,
            dtype=self.model.dtype or "",
            kv_bits=self.model.kv_bits,
            mtp=self.model.with_head,
            limits=pb.Limits(max_sequences=room.sequences, kv_tokens=room.kv_tokens),
            lease_ms=int(LEASE_TIMEOUTS * self.options.failure_timeout * 1000),
        )

        def on_progress(done: int, total: int) -> None:
            self.loads.done[stage.node] = (done, total)
            self.on_progress(self.loads)

        try:
            if not self.view.members[stage.node].whole:
                await self.model.provider.give(worker, request, on_progress)
            return await worker.load(request, on_progress)
        except ClusterError as error:
            self._happened(PlanFailed(epoch, str(error), stage.node))
            raise

    async def _serve_alone(self, epoch: int) -> None:
        try:
            pipeline = await self.alone(epoch)
        except ClusterError as error:
            self._happened(PlanFailed(epoch, str(error)))
        else:
            self.plan = None
            self._serves(pipeline)

    def _serves(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._happened(Serving(pipeline.epoch))
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(pipeline)

    # ---- workers

    async def _ticks(self) -> None:
        async with self._discovery as discovery:
            while True:
                for candidate in discovery.candidates():
                    self._ask(candidate)
                self._happened(Tick())
                await asyncio.sleep(TICK_SECONDS)

    def _ask(self, candidate: Candidate) -> None:
        """Ask a candidate who it is, unless it is known or was asked just now."""
        known = any(address in self.clients for address in candidate.addresses)
        if (
            not known
            and self.clock() - self._asked.get(candidate.id, -POLL_SECONDS) >= POLL_SECONDS
        ):
            self._asked[candidate.id] = self.clock() + DESCRIBE_SECONDS  # until it has answered
            self._spawn(self._meet(candidate))

    async def _meet(self, candidate: Candidate) -> None:
        """Believe the first of a candidate's addresses where the worker it names answers."""
        for address in candidate.addresses:
            client = WorkerClient(address, self.options.me)
            try:
                info = await client.describe(self.model.ref)
            except ClusterError as error:
                log.debug("no worker", extra={"address": address, "error": str(error)})
                await client.close()
                continue
            said = candidate.announcement
            if said is None or said.worker_id == info.worker_id:
                await self._welcome(address, client, info)
                break
            await client.close()
        self._asked[candidate.id] = self.clock()

    async def _welcome(self, address: str, client: WorkerClient, info: pb.WorkerInfo) -> None:
        """A worker that can serve us is watched from now on."""
        members = (self._joining.get(a) or self.view.members[a] for a in self.clients)
        if any(member.worker_id == info.worker_id for member in members):
            await client.close()  # known by another of its addresses
            return
        member = _member(address, info)
        reason = self._refusal(info)
        if reason:
            await client.close()
            self._refuse(member, reason)
            return
        self.clients[address] = client
        self._joining[address] = member
        client.watch(
            self.options.failure_timeout,
            lambda pulse: self._pulse(address, pulse),
            lambda error: self._lost(address, error),
        )

    def _refuse(self, member: Member, reason: str) -> None:
        before = self.view.members.get(member.address)
        if before is None or before.reason != reason:
            log.warning("worker refused", extra={"address": member.address, "reason": reason})
        self._happened(Refused(member, reason))

    def _refusal(self, info: pb.WorkerInfo) -> str:
        """Why a worker cannot serve us, empty when it can."""
        if info.HasField("claimed_by") and info.claimed_by.id != self.options.me.id:
            return f"serves coordinator {info.claimed_by.name}"
        if info.model and info.fingerprint != self.model.ref.fingerprint:
            theirs = info.fingerprint[:12] or "none"
            return f"has another checkpoint ({info.model}, fingerprint {theirs})"
        if not info.fingerprint and not self.model.provider.able:
            return "has no copy of the model: give it one, or serve with --share-weights"
        if info.state == pb.WORKER_STATE_DRAINING:
            return "is leaving"
        return ""

    def _pulse(self, address: str, pulse: pb.WorkerPulse) -> None:
        if pulse.engine_stall_ms > self.options.failure_timeout * 1000:
            stall = pulse.engine_stall_ms / 1000
            self._lost(address, WorkerLostError(f"its engine has been stuck for {stall:.1f} s"))
            return
        if (joining := self._joining.pop(address, None)) is not None:
            log.info("worker joined", extra={"address": address, "worker": joining.name})
            self._happened(Seen(joining))
        if pulse.state == pb.WORKER_STATE_DRAINING:
            self._leaves(address)
        if isinstance(self.pipeline, RemotePipeline) and pulse.epoch == self.pipeline.epoch:
            if pulse.HasField("fault"):
                suspect = self._to_blame(address, pulse.fault)
                self._broke(self.pipeline, pulse.fault.message, suspect)
            else:
                self.pipeline.heard(address, pulse)

    def _to_blame(self, address: str, fault: pb.Fault) -> str:
        """For a hop its far end, else the worker that reports the fault."""
        peers = (
            a for a, m in self.view.members.items() if fault.peer and m.worker_id == fault.peer
        )
        return next(peers, address)

    def _leaves(self, address: str) -> None:
        member = self.view.members.get(address)
        if address not in self.view.serving:
            self._spawn(self._farewell(address))
        elif member is not None and member.state is not MemberState.DRAINING:
            self._happened(Draining(address))

    async def _farewell(self, address: str) -> None:
        """A worker that no plan uses may leave."""
        client = self.clients.pop(address, None)
        if client is None:
            return
        with contextlib.suppress(ClusterError):
            await client.unload(self.view.epoch)
        await client.close()
        log.info("worker left", extra={"address": address})
        self._happened(Left(address))

    def _lost(self, address: str, error: ClusterError) -> None:
        client = self.clients.pop(address, None)
        if client is None:
            return
        self._spawn(client.close())
        if (joining := self._joining.pop(address, None)) is not None:
            self._refuse(joining, str(error))
            return
        log.warning("worker lost", extra={"address": address, "error": str(error)})
        self._happened(Lost(address, str(error)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _all(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run all of it at once; when one part fails, what is left of the others is cancelled."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _member(address: str, info: pb.WorkerInfo) -> Member:
    pinned = Span(info.pinned.start, info.pinned.end) if info.HasField("pinned") else None
    return Member(
        address,
        info.worker_id,
        info.name,
        info.hardware.memory_limit,
        speed=info.hardware.bytes_per_second / REFERENCE_BANDWIDTH or 1.0,
        chip=info.hardware.chip,
        pinned=pinned,
        whole=bool(info.fingerprint),
    )
