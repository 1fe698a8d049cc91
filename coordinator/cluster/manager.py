"""Executor of the cluster's decisions: feeds events into the view and carries out the resulting actions.

`decide` makes all decisions, and the view holds all state. `Membership` watches the workers. `PlanStart` makes a plan
serve. This module owns the running start of a plan and the pipeline in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from coordinator.cluster import decide, events
from coordinator.cluster.discovery import on_this_machine
from coordinator.cluster.events import apply
from coordinator.cluster.membership import ManagerOptions, Membership, unlike_machines
from coordinator.cluster.plan_start import MAX_FAULT, LoadState, PlanStart, describe_failure
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import Member, Phase, View
from coordinator.pipeline.pipeline import Pipeline, PipelineSource
from coordinator.planning.plan import Plan
from mtp.device import Arithmetic
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, NotReadyError, StaleEpochError, WorkerLostError
from proto.rpc.listener import BackgroundTasks
from proto.rpc.status_codes import printable

log = logging.getLogger(__name__)


CLOSE_SECONDS = 5.0
"""Seconds. Bound on unloading all workers when the coordinator ends."""

SILENCE_SECONDS = 720.0
"""Seconds. Longest time without progress of a plan that loads. The check of `--exact` on CUDA may take ten minutes."""


@dataclass(eq=False)
class ClusterManager(PipelineSource):
    """A source of pipelines over workers, or over this process when no worker can serve.

    `alone(epoch)` makes one of this process. An automatic change of plan waits until `count_open_requests()` is 0.
    """

    model: ServedModel
    options: ManagerOptions
    alone: Callable[[int], Awaitable[Pipeline]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.count_open_requests: Callable[[], int] = lambda: 0
        self.hand_over: Callable[[bool], None] = lambda begin: None
        """Called to begin to back up open answers, and with False when the plan changes or stays after all."""
        self.is_handed_over: Callable[[], bool] = lambda: False
        self.end_process: Callable[[ClusterError], None] = lambda error: None
        """Called once if an event raises an unexpected exception, after which no plan can start any more."""
        model, options, clock = self.model, self.options, self.clock
        self.view = View(options.settings, now=clock(), since=clock())
        self.membership = Membership(model, options, lambda: self.view, self._apply_event, self._receive_status, clock)
        self.plan: Plan | None = None
        """The plan that serves or starts. None without a plan and while this process serves alone."""
        self.pipeline: Pipeline | None = None
        self.loads = LoadState()
        self._planner = model.planner()
        self._waiter: asyncio.Future[Pipeline] | None = None
        self._start: asyncio.Task[None] | None = None
        self._preparation: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()
        self._is_closing = False

    # ---- life

    def start(self) -> None:
        """Begin to look for workers."""
        self.membership.start(lambda: events.TimePassed(self.count_open_requests(), self.is_handed_over()))

    def describe_gathering(self) -> str:
        """Return what the first plan waits for, while it does; else an empty text."""
        if self.view.phase is not Phase.GATHERING:
            return ""
        return f"waiting for workers: {decide.describe_wait(self.view, self._planner)}"

    async def problem_with(self, model: ServedModel, why_not_alone: str) -> str:
        """Return why neither the workers that are ready nor this process can serve `model`; empty if they can."""
        described = await self.membership.describe_for(model)
        usable = [found for found in described.values() if isinstance(found, Member)]
        problems = [found for found in described.values() if isinstance(found, str)]
        if usable:
            try:
                model.planner()(usable, self.view.epoch + 1)
            except ClusterError as error:
                problems.append(str(error))
            else:
                return ""
        return "; ".join((*problems, why_not_alone)) if why_not_alone else ""

    async def change_model(
        self, model: ServedModel, alone: Callable[[int], Awaitable[Pipeline]], why_not_alone: str
    ) -> None:
        """Serve `model` over the same leases. The pipeline in force ends; `acquire` returns the next one."""
        described = await self.membership.describe_for(model)
        self._stop_plan(StaleEpochError("the cluster changes to another model"))
        self.model, self.alone, self.loads = model, alone, LoadState()
        self._planner = model.planner()
        self.view = replace(self.view, serving=())
        self.membership.change_model(model, described)
        self._apply_event(events.ModelChanged(why_not_alone))

    async def close(self) -> None:
        """Unload the workers, within CLOSE_SECONDS even if one of them does not answer."""
        # An unloaded worker ends its stream while others are still asked. That must not start another plan.
        self._is_closing = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if self.pipeline is not None:  # the loop may not have acquired it
                    await self.pipeline.close()
                await self._background.close()
                await self.membership.close()
        except TimeoutError:
            log.warning("not all workers were unloaded", extra={"seconds": CLOSE_SECONDS})

    def local_worker_bytes(self) -> int:
        """Return the bytes that watched workers on this machine use. A pipeline of this process leaves them free."""
        local = (c for address, c in self.membership.clients.items() if on_this_machine(address))
        statuses = [client.worker_status for client in local]
        return sum(s.memory_used + s.memory_cached for s in statuses if s is not None)

    # ---- PipelineSource

    async def acquire(self) -> Pipeline:
        before = None
        while before != (progress := self._progress()):
            if self.view.phase is Phase.SERVING and self.pipeline is not None:
                return self.pipeline
            before, self._waiter = progress, asyncio.get_running_loop().create_future()
            if self.view.phase is Phase.ENDED:
                self._apply_event(events.GatheringRestarted())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_SECONDS):
                    return await self._waiter
        raise NotReadyError(f"no plan serves: no progress for {SILENCE_SECONDS:g} s. Try again")

    def _progress(self) -> tuple[object, ...]:
        """Return what changes while a plan is on its way. Ticks bound the wait for workers, so their time counts."""
        gathering = self.view.phase is Phase.GATHERING
        return self.view.epoch, self.loads.totals, gathering and self.view.now

    def report_failure(self, pipeline: Pipeline, error: Exception) -> None:
        if pipeline is self.pipeline:
            self._fail_pipeline(pipeline, str(error), pipeline.suspect)

    def _fail_pipeline(self, pipeline: Pipeline, reason: str, suspect: str | None) -> None:
        """End the pipeline in force. `suspect` is the worker to leave out next time, if all workers are alive."""
        self._drop_pipeline(WorkerLostError(reason))
        if self.view.phase is Phase.SERVING and self.view.epoch == pipeline.epoch:
            self._background.spawn(self._probe_failed_plan(pipeline.epoch, reason, suspect))

    def _drop_pipeline(self, error: ClusterError) -> None:
        """Fail the pipeline in force with `error`, which its `receive` raises, and close it."""
        if self.pipeline is not None:
            pipeline, self.pipeline = self.pipeline, None
            pipeline.fail(error)
            self._background.spawn(pipeline.close())

    async def _probe_failed_plan(self, epoch: int, reason: str, suspect: str | None) -> None:
        """Probe every worker of a failed plan, so that the next plan leaves out those that do not answer."""
        probes = (self.membership.probe(address) for address in self.view.serving)
        await asyncio.gather(*probes, return_exceptions=True)
        self._apply_event(events.PlanFailed(epoch, reason, suspect))

    # ---- events and actions

    def _apply_event(self, event: events.Event) -> None:
        if self._is_closing:
            return
        try:
            self._apply_and_act(event)
        except Exception as error:  # a bug: the next event would fail too, and no plan would start
            log.exception("an event of the cluster failed", extra={"event": event})
            self._is_closing = True
            cause = f"{type(error).__name__}: {error}. Start again, and report this bug"
            self.end_process(ClusterError(f"the cluster cannot plan: {cause}"))

    def _apply_and_act(self, event: events.Event) -> None:
        before = self.view
        self.view = apply(before, event, self.clock())
        if not isinstance(event, events.TimePassed):
            log.debug("event", extra={"event": event})
        if before.phase is not self.view.phase:
            extra: dict[str, object] = {"epoch": self.view.epoch, "workers": len(self.view.serving)}
            if self.view.problem:
                extra["problem"] = self.view.problem
            log.info("cluster: %s", self.view.phase.value, extra=extra)
        if before.serving and not self.view.serving:
            self._stop_plan(WorkerLostError(self.view.problem))
        if before.preparing and not self.view.preparing:
            self._cancel_preparation()
        if before.hands_over_until is not None and self.view.hands_over_until is None:
            self.hand_over(False)
        action = decide.decide(self.view, self._planner)
        if action is not None:
            self._execute(action)

    def _stop_plan(self, error: ClusterError) -> None:
        """Cancel the plan in force, whether it serves or starts."""
        if self._start is not None:
            self._start.cancel()
        self._cancel_preparation()
        self.plan = None
        self._drop_pipeline(error)

    def _execute(self, action: decide.Action) -> None:
        match action:
            case decide.StartPlan(plan, reason):
                if plan.reason:
                    log.info("plan", extra={"epoch": plan.epoch, "reason": plan.reason})
                if reason:
                    log.info("changing the plan", extra={"epoch": plan.epoch, "reason": reason})
                starting = events.PlanStarting(plan.epoch, plan.nodes, plan.group_size)
                self._begin(starting, self._serve(plan))
            case decide.PreparePlan(plan, reason, workers):
                self._cancel_preparation()
                start = PlanStart(plan, self.view, self.model, self.options, self.membership)
                new = [address for address in plan.nodes if address not in start.busy]
                names = ", ".join(self.view.members[address].name for address in new) or "none"
                log.info("preparing the next plan", extra={"loading": names, "reason": reason})
                self._preparation = self._background.spawn(self._prepare(start, workers))
                self._apply_event(events.PlanPreparing(workers))
            case decide.StartAlone(epoch):
                self._begin(events.PlanStarting(epoch, ()), self._serve_alone(epoch))
            case decide.KeepPlan(reason):
                log.info("the plan stays as it is", extra={"reason": reason})
                self._apply_event(events.PlanKept())
            case decide.PostponePlan(workers):
                log.info(
                    "workers joined: they will be used when no answer is open, or in a minute",
                    extra={"workers": ", ".join(workers)},
                )
                self._apply_event(events.PlanPostponed())
            case decide.HandOver(seconds):
                log.info("backing up open answers for the next plan", extra={"seconds": seconds})
                self.hand_over(True)
                self._apply_event(events.HandOverStarting(self.view.now + seconds))
            case decide.GiveUp(reason):
                self._apply_event(events.GatheringFailed(reason))
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(NotReadyError(reason))

    def _begin(self, starting: events.PlanStarting, work: Coroutine[Any, Any, None]) -> None:
        self._stop_plan(StaleEpochError("the cluster is changing its plan"))
        # Applied before `work` starts: this event stops a plan over workers that gives way to this process.
        self._apply_event(starting)
        self._start = self._background.spawn(work)

    async def _prepare(self, start: PlanStart, workers: frozenset[str]) -> None:
        event = await start.prepare(workers)
        self._preparation = None
        self._apply_event(event)

    def _cancel_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
            self._preparation = None

    async def _serve(self, plan: Plan) -> None:
        """Load and connect `plan`, and complete `acquire` with its pipeline."""
        self.plan = plan
        start = PlanStart(plan, self.view, self.model, self.options, self.membership)
        self.loads = start.loads
        try:
            pipeline = await start.run()
            self._record_collectives(plan)
            if reason := self._why_not_a_group(plan):
                await pipeline.close()
                self._apply_event(events.PlanFailed(plan.epoch, reason, learned=True))
                return
        except Exception as error:
            self._apply_event(events.PlanFailed(plan.epoch, *describe_failure(error)))
            return
        members = [start.view.members[node] for node in plan.nodes]
        if unlike := unlike_machines((member.name, member.arithmetic) for member in members):
            log.info(unlike)
        self._install_pipeline(pipeline)

    async def _serve_alone(self, epoch: int) -> None:
        if reason := self.membership.group.refusal("this process", str(Arithmetic.here())):
            self._apply_event(events.PlanFailed(epoch, f"this process {reason}"))
            return
        try:
            pipeline = await self.alone(epoch)
        except Exception as error:
            self._apply_event(events.PlanFailed(epoch, *describe_failure(error)))
            return
        members = self.view.members.values()
        reasons = [f"{m.name}: {m.reason}" for m in members if m.reason]
        silent = set(self.options.addresses) - {m.address for m in members}
        reasons += [f"{address} does not answer" for address in sorted(silent)]
        reason = "; ".join(reasons) or "no worker was found"
        level = logging.WARNING if self.options.addresses else logging.INFO
        log.log(level, "serving alone", extra={"epoch": epoch, "reason": reason})
        self._install_pipeline(pipeline)

    def _record_collectives(self, plan: Plan) -> None:
        """Keep what the members of groups have measured, for the next plan."""
        measured = self.loads.collectives
        for stage in plan.stages:
            found = [measured[node] for node in stage.nodes if node in measured]
            if found:
                self._apply_event(events.GroupMeasured(stage.nodes, max(found)))
                sum_us = round(max(found) * 1e6)
                log.info("group", extra={"members": len(stage.nodes), "sum_us": sum_us})

    def _why_not_a_group(self, plan: Plan) -> str:
        """Return why another plan suits the sums that the members of a group have measured, or an empty string."""
        members = self.view.members
        nodes = (*plan.nodes, *plan.unused)
        if not self.loads.collectives or not members.keys() >= set(nodes):
            return ""
        try:
            found = self._planner([members[node] for node in nodes], plan.epoch)
        except ClusterError as error:
            return str(error)
        if found.group_size == plan.group_size:
            return ""
        slowest = max(self.loads.collectives.values())
        return f"a sum over the group takes {slowest * 1e3:.3g} ms. {found.reason or 'The next plan is a pipeline'}"

    def _install_pipeline(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._apply_event(events.PlanServing(pipeline.epoch))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(pipeline)

    # ---- worker statuses

    def _receive_status(self, address: str, worker_status: pb.WorkerStatus) -> None:
        """Pass the status of a watched worker to the pipeline in force, or fail the pipeline with its fault."""
        pipeline = self.pipeline
        if pipeline is None or worker_status.epoch != pipeline.epoch:
            return
        if worker_status.HasField("fault"):
            fault = worker_status.fault
            # The suspect is the far end of a failed hop, or else the worker that reports the fault.
            members = self.view.members.items() if fault.peer else ()
            peers = (a for a, m in members if m.worker_id == fault.peer)
            self._fail_pipeline(pipeline, printable(fault.message, MAX_FAULT), next(peers, address))
        else:
            pipeline.record_worker_status(address, worker_status)
