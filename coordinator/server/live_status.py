"""The live status of a server, made from the generation loop and the cluster's view."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.member import Member, MemberState
from coordinator.cluster.view import Phase
from coordinator.generation.loop import GenerationLoop
from coordinator.generation.snapshot import LoopSnapshot
from coordinator.planning.model_costs import REFERENCE_BANDWIDTH
from coordinator.planning.plan import StagePlan
from coordinator.status.cluster_status import (
    ClusterStatus,
    Health,
    ModelStatus,
    MtpChoices,
    MtpShape,
    NodeStatus,
    PrefillStatus,
)
from coordinator.status.job_status import JobStatus
from coordinator.workers.client import WorkerClient
from mtp.depth.report import SearchReport
from proto import cluster_pb2 as pb


class LiveStatus:
    """The StatusSource of a server.

    `manager` is None in single-node mode. `alone()` returns the status of this process while it serves alone.
    """

    def __init__(
        self,
        loop: GenerationLoop,
        manager: ClusterManager | None,
        model: str,
        alone: Callable[[], NodeStatus],
        architecture: ModelStatus | None = None,
        machine: Callable[[], pb.MachineState] = pb.MachineState,
        jobs: Callable[[], tuple[JobStatus, ...]] = tuple,
    ) -> None:
        self.loop = loop
        self.architecture = architecture
        self.alone = alone
        self.machine = machine
        """A function that returns the state of this machine."""
        self.jobs = jobs
        """A function that returns the jobs on models."""
        self.manager = manager
        self.model = model
        self._started = loop.clock()
        self._epoch_offset = time.time() - (manager.clock() if manager else 0.0)

    def status(self) -> ClusterStatus:
        """See StatusSource."""
        loop = self.loop.snapshot()
        return ClusterStatus(
            ready=loop.serving,
            model=self.model,
            detail=self._detail(loop),
            epoch=loop.epoch,
            mtp=loop.mtp,
            nodes=self._nodes(loop),
            running=len(loop.requests),
            running_limit=loop.request_limit,
            waiting=loop.waiting,
            waiting_limit=loop.waiting_limit,
            kv_tokens=loop.kv_tokens,
            kv_limit=loop.kv_limit,
            tokens_per_second=loop.tokens_per_second,
            drafted_by_position=loop.drafted_by_position,
            accepted_by_position=loop.accepted_by_position,
            prefilling=tuple(
                PrefillStatus(r.request_id, r.computed_tokens, r.prefill_tokens, r.prefill_seconds)
                for r in loop.requests
                if r.prefilling
            ),
            recoveries=loop.recoveries,
            uptime_seconds=self.loop.clock() - self._started,
            architecture=self.architecture,
            mtp_choices=tuple(_choices(report) for report in loop.choices),
            jobs=self.jobs(),
            **self._cluster_fields(),
        )

    def _cluster_fields(self) -> dict[str, Any]:
        """Return the fields that only a server with a cluster has."""
        if self.manager is None:
            return {"phase_seconds": self.loop.clock() - self._started}
        view, replans = self.manager.view, self.manager.replans
        return {
            "phase": view.phase.value,
            "phase_seconds": view.now - view.since,
            "replans": replans.answered,
            "replan_result": replans.result,
            "workers_wanted": view.settings.nodes,
        }

    def _detail(self, loop: LoopSnapshot) -> str:
        if self.manager is None or loop.serving:
            return ""
        view = self.manager.view
        return f"{view.phase.value}: {view.problem}" if view.problem else view.phase.value

    def _nodes(self, loop: LoopSnapshot) -> tuple[NodeStatus, ...]:
        times = loop.stage_ms
        if self.manager is None or (loop.serving and not self.manager.view.serving):
            weights = self.architecture.weight_bytes if self.architecture else 0
            alone = replace(
                self.alone(),
                stage_ms=sum(times) if times else None,
                weight_bytes=weights,
                prefix_bytes=loop.prefix_bytes,
                **machine_fields(self.machine()),
            )
            others = [] if self.manager is None else self._members({}, loop)
            return (alone, *others)
        plan = self.manager.plan
        stages = {s.node: (i, s) for i, s in enumerate(plan.stages)} if plan else {}
        return tuple(self._members(stages, loop))

    def _members(
        self, stages: dict[str, tuple[int, StagePlan]], loop: LoopSnapshot
    ) -> list[NodeStatus]:
        assert self.manager is not None
        members = sorted(
            self.manager.view.members.values(),
            key=lambda m: (stages[m.address][0] if m.address in stages else 99, m.address),
        )
        return [self._member(m, stages.get(m.address), loop) for m in members]

    def _member(
        self, member: Member, stage: tuple[int, StagePlan] | None, loop: LoopSnapshot
    ) -> NodeStatus:
        assert self.manager is not None
        view, times = self.manager.view, loop.stage_ms
        client = self.manager.clients.get(member.address)
        worker_status = client.worker_status if client else None
        in_use = stage is not None and member.address in view.serving
        done, total = self.manager.loads.done.get(member.address, (0, 0))
        loading = view.phase is Phase.STARTING and member.address in view.serving
        return NodeStatus(
            name=member.name,
            address=member.address,
            span=str(stage[1].span) if stage and in_use else None,
            health=_health(member, in_use=in_use, loading=loading),
            detail=_detail(member, view.now),
            memory_used=worker_status.memory_used if worker_status else 0,
            memory_cached=worker_status.memory_cached if worker_status else 0,
            memory_limit=member.memory_limit,
            loaded=done / total if loading and total else None,
            stage_ms=times[stage[0]] if stage and in_use and stage[0] < len(times) else None,
            weight_bytes=stage[1].weight_bytes if stage and in_use else 0,
            prefix_bytes=loop.prefix_bytes if in_use else 0,
            chip=member.chip,
            bytes_per_second=member.speed * REFERENCE_BANDWIDTH,
            pinned=str(member.pinned) if member.pinned else None,
            failure_count=member.failure_count,
            loaded_bytes=done if loading else 0,
            load_bytes=total if loading else 0,
            weights_from=self._weights_from(member) if loading else "",
            ready_at=self._unix_time(member.joined_at) if member.joined_at else None,
            **_link_fields(client, in_use=in_use),
            version=member.version,
            arithmetic=member.arithmetic,
            **_counters(worker_status),
        )

    def _unix_time(self, moment: float) -> int:
        """Return a time of the manager's clock as seconds since 1970."""
        return round(moment + self._epoch_offset)

    def _weights_from(self, member: Member) -> str:
        assert self.manager is not None
        if member.has_files:
            return "disk"
        return "coordinator" if self.manager.model.share_weights else "hub"


def _choices(report: SearchReport) -> MtpChoices:
    shapes = tuple(MtpShape(**asdict(shape)) for shape in report.shapes)
    speed = 1 / report.plain_seconds if report.plain_seconds else None
    return MtpChoices(report.sequences, report.fill, shapes, speed)


def _link_fields(client: WorkerClient | None, *, in_use: bool) -> dict[str, Any]:
    """Return the fields of a NodeStatus about its link: to the next stage, or to the coordinator."""
    if client is None:
        return {}
    if not in_use or client.hop is None:
        return {"link_kind": client.route_kind}
    return {
        "link_ms": client.hop.seconds * 1000,
        "link_bytes_per_second": round(client.hop.bytes_per_second) or None,
        "link_kind": client.hop.kind,
    }


def _counters(worker_status: pb.WorkerStatus | None) -> dict[str, Any]:
    """Return the fields of a NodeStatus that the worker counts."""
    if worker_status is None:
        return {}
    return {
        "busy_seconds": worker_status.busy_us / 1e6,
        "bytes_in": worker_status.bytes_in,
        "bytes_out": worker_status.bytes_out,
        **machine_fields(worker_status.machine),
    }


def machine_fields(state: pb.MachineState) -> dict[str, Any]:
    """Return the fields of a NodeStatus about the whole machine. Values that the worker does not report are None."""
    if not state.memory_free:  # a worker of an earlier release
        return {}
    temperature = state.temperature if state.HasField("temperature") else None
    power = state.power if state.HasField("power") else None
    return {
        "memory_free": state.memory_free,
        "swap_used": state.swap_used,
        "temperature": _finite(temperature),
        "power": _finite(power),
    }


def _finite(value: float | None) -> float | None:
    """Return `value` with one digit, or None for a number that JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else round(value, 1)


def _health(member: Member, *, in_use: bool, loading: bool) -> Health:
    match member.state:
        case MemberState.LOST | MemberState.REFUSED | MemberState.DRAINING as state:
            known: dict[MemberState, Health] = {
                MemberState.LOST: "lost",
                MemberState.REFUSED: "refused",
                MemberState.DRAINING: "draining",
            }
            return known[state]
        case _ if loading:
            return "loading"
        case _:
            return "ready" if in_use else "idle"


def _detail(member: Member, now: float) -> str:
    """Return why a worker is not used, for people."""
    if member.backoff_until > now:
        seconds = member.backoff_until - now
        return f"not used for {seconds:.0f} s, after {member.failure_count} failures"
    if member.state not in (MemberState.LOST, MemberState.REFUSED):
        return ""
    return member.reason.removeprefix(f"{member.address} is lost: ")  # the row shows the address
