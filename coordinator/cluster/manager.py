"""The edge of the cluster: tells the view what happens, and carries out what is decided.

All decisions are `decide.decide`'s and all state is the view; `membership` watches the workers, `start` makes a plan
serve, and here is the task that is under way and the pipeline in force.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from coordinator.cluster.apply import apply
from coordinator.cluster.background import Background
from coordinator.cluster.decide import Action, GiveUp, KeepPlan, StartPlan, StartAlone, decide
from coordinator.cluster.events import (
    GatheringFailed,
    Event,
    GatheringRestarted,
    PlanKept,
    PlanFailed,
    ReplanRequested,
    PlanServing,
    PlanStarting,
    TimePassed,
)
from coordinator.cluster.membership import Membership
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.plan_start import LoadState, PlanStart, StartError
from coordinator.cluster.served import ServedModel
from coordinator.cluster.view import Phase, View
from coordinator.pipeline.base import Pipeline
from coordinator.pipeline.remote import RemotePipeline
from coordinator.planning.plan import Plan
from coordinator.workers.client import WorkerClient
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, NotReadyError, StaleEpochError, WorkerLostError

log = logging.getLogger(__name__)

LINK_SECONDS = 1e-4
"""A hop, for the planner, until measured: what a gRPC stream on a local network was seen to take."""

CLOSE_SECONDS = 5.0
"""Longest wait for workers to be let go."""


class ClusterManager:
    """Implements `coordinator.pipeline.base.PipelineSource` over workers, with this process as a last resort.

    `alone(epoch)` makes the pipeline of this process.
    """

    def __init__(
        self,
        model: ServedModel,
        options: ManagerOptions,
        alone: Callable[[int], Awaitable[Pipeline]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.options = options
        self.alone = alone
        self.clock = clock
        self.view = View(options.settings, now=clock(), since=clock())
        self.membership = Membership(
            model, options, lambda: self.view, self._apply_event, self._worker_status, clock
        )
        self.plan: Plan | None = None
        """The plan that serves or starts; None while there is none or this process serves alone."""
        self.pipeline: Pipeline | None = None
        self.loads = LoadState()
        self._planner = model.planner(LINK_SECONDS)
        self._waiter: asyncio.Future[Pipeline] | None = None
        self._start: asyncio.Task[None] | None = None
        self._background = Background()
        self._is_closing = False
        self._reported_no_mtp = False

    # ---- life

    def start(self) -> None:
        """Begin to look for workers."""
        self.membership.start()

    def replan(self) -> None:
        """Use the workers there are as well as can be, though the present plan works."""
        self._apply_event(ReplanRequested())

    async def close(self) -> None:
        """Let the workers go; a process that must end does not wait for one that does not answer."""
        # Who is let go ends its stream while others are still asked: that is no news to plan by.
        self._is_closing = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._background.close()
                await self.membership.close()
        except TimeoutError:
            log.warning("not all workers could be let go")

    @property
    def clients(self) -> dict[str, WorkerClient]:
        """Workers that are watched, by address."""
        return self.membership.clients

    # ---- PipelineSource

    async def acquire(self) -> Pipeline:
        if self.view.phase is Phase.SERVING and self.pipeline is not None:
            return self.pipeline
        self._waiter = asyncio.get_running_loop().create_future()
        if self.view.phase is Phase.ENDED:
            self._apply_event(GatheringRestarted())
        return await self._waiter

    def failed(self, pipeline: Pipeline, error: Exception) -> None:
        if pipeline is self.pipeline:
            suspect = pipeline.suspect if isinstance(pipeline, RemotePipeline) else None
            self._fail_pipeline(pipeline, str(error), suspect)

    def _fail_pipeline(self, pipeline: Pipeline, reason: str, suspect: str | None) -> None:
        """The pipeline in force has failed; `suspect` is the worker to leave out next time, if all are alive."""
        self._drop_pipeline(WorkerLostError(reason))
        if self.view.phase is Phase.SERVING and self.view.epoch == pipeline.epoch:
            self._background.spawn(self._probe_failed_plan(pipeline.epoch, reason, suspect))

    def _drop_pipeline(self, error: ClusterError) -> None:
        """Whoever waits on the pipeline in force hears why it is void; nobody need have taken it to begin with."""
        if self.pipeline is not None:
            pipeline, self.pipeline = self.pipeline, None
            pipeline.fail(error)
            self._background.spawn(pipeline.close())

    async def _probe_failed_plan(self, epoch: int, reason: str, suspect: str | None) -> None:
        """Ask every worker of a failed plan whether it lives, so that the next plan leaves out those that do not."""
        await asyncio.gather(*(self.membership.probe(address) for address in self.view.serving))
        self._apply_event(PlanFailed(epoch, reason, suspect))

    # ---- events and actions

    def _apply_event(self, event: Event) -> None:
        if self._is_closing:
            return
        before = self.view
        self.view = apply(before, event, self.clock())
        if not isinstance(event, TimePassed):
            log.debug("event", extra={"event": event})
        if before.phase is not self.view.phase:
            log.info(
                "cluster: %s",
                self.view.phase.value,
                extra={"epoch": self.view.epoch, "problem": self.view.problem},
            )
        if before.serving and not self.view.serving:
            self._stop_plan(WorkerLostError(self.view.problem))
        action = decide(self.view, self._planner)
        if action is not None:
            self._execute(action)

    def _stop_plan(self, error: ClusterError) -> None:
        """The plan in force is void, whether it serves or starts."""
        if self._start is not None:
            self._start.cancel()
        self.plan = None
        self._drop_pipeline(error)

    def _execute(self, action: Action) -> None:
        match action:
            case StartPlan(plan):
                addresses = tuple(stage.node for stage in plan.stages)
                self._begin(plan.epoch, addresses, self._serve(plan))
            case StartAlone(epoch):
                self._begin(epoch, (), self._serve_alone(epoch))
            case KeepPlan(reason):
                log.info("the plan stays as it is", extra={"reason": reason})
                self._apply_event(PlanKept())
            case GiveUp(reason):
                self._apply_event(GatheringFailed(reason))
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(NotReadyError(reason))

    def _begin(
        self, epoch: int, addresses: tuple[str, ...], work: Coroutine[Any, Any, None]
    ) -> None:
        self._stop_plan(StaleEpochError("the cluster is changing its plan"))
        # First: a plan over workers that gives way to none is stopped by it, with whatever is starting.
        self._apply_event(PlanStarting(epoch, addresses))
        self._start = self._background.spawn(work)

    async def _serve(self, plan: Plan) -> None:
        """Load and connect a plan, and give its pipeline to whoever waits."""
        self.plan = plan
        try:
            start = PlanStart(plan, self.view, self.model, self.options, self.membership)
            self.loads = start.loads
            pipeline = await start.run()
        except ClusterError as error:
            suspect = error.suspect if isinstance(error, StartError) else None
            self._apply_event(PlanFailed(plan.epoch, str(error), suspect))
        except Exception as error:  # a bug of ours: whoever waits must not wait for ever
            log.exception("a plan could not be started")
            self._apply_event(PlanFailed(plan.epoch, f"{type(error).__name__}: {error}"))
        else:
            if self.model.with_head and not start.has_mtp and not self._reported_no_mtp:
                self._reported_no_mtp = True
                log.info(
                    "no MTP: the last stage has no head", extra={"worker": plan.stages[-1].node}
                )
            self._install_pipeline(pipeline)

    async def _serve_alone(self, epoch: int) -> None:
        try:
            pipeline = await self.alone(epoch)
        except ClusterError as error:
            self._apply_event(PlanFailed(epoch, str(error)))
        except Exception as error:  # as in _serve
            log.exception("this process could not serve alone")
            self._apply_event(PlanFailed(epoch, f"{type(error).__name__}: {error}"))
        else:
            log.info("serving alone", extra={"epoch": epoch})
            self._install_pipeline(pipeline)

    def _install_pipeline(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._apply_event(PlanServing(pipeline.epoch))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(pipeline)

    # ---- what workers say

    def _worker_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """A watched worker told where it stands in the plan in force, or that it cannot go on."""
        pipeline = self.pipeline
        if not isinstance(pipeline, RemotePipeline) or worker_status.epoch != pipeline.epoch:
            return
        if worker_status.HasField("fault"):
            self._fail_pipeline(
                pipeline, worker_status.fault.message, self._suspect_of(address, worker_status.fault)
            )
        else:
            pipeline.heard(address, worker_status)

    def _suspect_of(self, address: str, fault: pb.Fault) -> str:
        """For a hop its far end, else the worker that reports the fault."""
        peers = (
            a for a, m in self.view.members.items() if fault.peer and m.worker_id == fault.peer
        )
        return next(peers, address)
