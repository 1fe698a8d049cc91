"""The live status of a server, made from the generation loop and the cluster's view, and its frame trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.membership import unlike_machines
from coordinator.cluster.view import Member, MemberState, Phase
from coordinator.planning.capacity import REFERENCE_BANDWIDTH
from coordinator.planning.plan import StagePlan
from coordinator.schedule.loop import GenerationLoop
from coordinator.status.cluster_status import ClusterStatus, Health, ModelStatus, NodeStatus, StatusSource
from coordinator.status.frame_records import StageLoad
from coordinator.status.frame_trace import chrome_trace, step_table
from proto.terminal.progress import format_size


@dataclass(eq=False)
class LiveStatus(StatusSource):
    """The status of a server. `manager` is None in single-node mode; `alone()` is the status of this process."""

    loop: GenerationLoop
    manager: ClusterManager | None
    model: str
    alone: Callable[[], NodeStatus]
    architecture: ModelStatus | None = None

    def __post_init__(self) -> None:
        self._started = self.loop.clock()
        self._epoch_offset = time.time() - (self.manager.clock() if self.manager else 0.0)

    async def trace(self, seconds: float) -> dict[str, Any]:
        """Return the trace of the last `seconds`. Raises NotReadyError if no plan serves."""
        processes = await self.loop.collect_trace(seconds)
        return {"trace": chrome_trace(processes), "table": step_table(processes)}

    def status(self) -> ClusterStatus:
        loop = self.loop.status()
        up = self.loop.clock() - self._started
        nodes = self._nodes(loop)
        rounding = unlike_machines((node.name, node.arithmetic) for node in nodes if node.span and node.address)
        found = replace(loop, model=self.model, detail=self._detail(loop), nodes=nodes, rounding=rounding)
        found = replace(found, architecture=self.architecture, uptime_seconds=up, phase_seconds=up)
        if self.manager is None:
            return found
        view = self.manager.view
        return replace(found, phase=view.phase.value, phase_seconds=view.now - view.since)

    def _detail(self, loop: ClusterStatus) -> str:
        if self.manager is None or loop.ready:
            return ""
        view = self.manager.view
        phase = self.manager.describe_gathering() or view.phase.value
        loads = [self.manager.loads.done.get(address, (0, 0)) for address in view.serving]
        if view.phase is Phase.STARTING and (total := sum(load for _, load in loads)):
            phase = f"{phase}: {format_size(sum(done for done, _ in loads))} of {format_size(total)}"
        return f"{phase}; {view.problem}" if view.problem else phase

    def _nodes(self, loop: ClusterStatus) -> tuple[NodeStatus, ...]:
        loads = self.loop.frames.stage_loads(loop.epoch, self.loop.clock())
        if self.manager is None or (loop.ready and not self.manager.view.serving):
            weights = self.architecture.weight_bytes if self.architecture else 0
            alone = replace(
                self.alone(),
                stage_ms=sum(load.step_ms or 0.0 for load in loads) or None,
                busy=min(1.0, sum(load.busy for load in loads)),
                weight_bytes=weights,
                prefix_bytes=self.loop.scheduler.prefixes.nbytes,
            )
            others = [] if self.manager is None else self._members({}, ())
            return (alone, *others)
        plan = self.manager.plan
        planned = plan.stages if plan else ()
        stages = {node: (i, stage) for i, stage in enumerate(planned) for node in stage.nodes}
        if len(loads) != len(planned):  # no frame of this plan has returned yet
            loads = (StageLoad(None, 0.0),) * len(planned)
        return tuple(self._members(stages, loads))

    def _members(self, stages: dict[str, tuple[int, StagePlan]], loads: tuple[StageLoad, ...]) -> list[NodeStatus]:
        assert self.manager is not None
        members = sorted(
            self.manager.view.members.values(),
            key=lambda m: (stages[m.address][0] if m.address in stages else 99, m.address),
        )
        return [self._member(m, stages.get(m.address), loads) for m in members]

    def _layers(self, member: Member, stage: StagePlan) -> str:
        """Return how a worker's layers compute, with its share and the time of a sum in a group."""
        assert self.manager is not None
        layers = self.manager.loads.layers.get(member.address, "")
        if not stage.members or not layers:
            return layers
        share = f"{layers}, share {stage.nodes.index(member.address) + 1} of {len(stage.nodes)}"
        seconds = self.manager.loads.collectives.get(member.address)
        return f"{share}, {seconds * 1e6:.0f} us a sum" if seconds else share

    def _member(self, member: Member, stage: tuple[int, StagePlan] | None, loads: tuple[StageLoad, ...]) -> NodeStatus:
        assert self.manager is not None
        view = self.manager.view
        client = self.manager.membership.clients.get(member.address)
        in_use = stage is not None and member.address in view.serving
        if client and in_use:
            client = client.member or client
        worker_status = client.worker_status if client else None
        load = loads[stage[0]] if stage and in_use else None
        done, total = self.manager.loads.done.get(member.address, (0, 0))
        loading = view.phase is Phase.STARTING and member.address in view.serving
        elsewhere = "coordinator" if self.manager.model.share_weights else "hub"
        source = "disk" if member.has_files else elsewhere
        hop = client.hop if client and in_use else None
        return NodeStatus(
            name=member.name,
            address=member.address,
            span=str(stage[1].span) if stage and in_use else None,
            layers=self._layers(member, stage[1]) if stage and in_use else "",
            health=_health(member, in_use=in_use, loading=loading),
            detail=_detail(member, view.now),
            memory_used=worker_status.memory_used if worker_status else 0,
            memory_cached=worker_status.memory_cached if worker_status else 0,
            memory_limit=member.memory_limit,
            loaded=done / total if loading and total else None,
            stage_ms=load.step_ms if load else None,
            busy=load.busy if load else None,
            weight_bytes=stage[1].weight_bytes if stage and in_use else 0,
            prefix_bytes=self.loop.scheduler.prefixes.nbytes if in_use else 0,
            chip=member.chip,
            bytes_per_second=member.speed * REFERENCE_BANDWIDTH,
            pinned=str(member.pinned) if member.pinned else None,
            failure_count=member.failure_count,
            loaded_bytes=done if loading else 0,
            load_bytes=total if loading else 0,
            weights_from=source if loading else "",
            ready_at=round(member.joined_at + self._epoch_offset) if member.joined_at else None,
            link_ms=hop.seconds * 1000 if hop else None,
            link_bytes_per_second=round(hop.bytes_per_second) or None if hop else None,
            version=member.version,
            arithmetic=member.arithmetic,
            bytes_in=worker_status.bytes_in if worker_status else 0,
            bytes_out=worker_status.bytes_out if worker_status else 0,
        )


def _health(member: Member, *, in_use: bool, loading: bool) -> Health:
    if member.state in (MemberState.LOST, MemberState.REFUSED, MemberState.DRAINING):
        return cast(Health, member.state.value)
    if loading:
        return "loading"
    return "ready" if in_use else "idle"


def _detail(member: Member, now: float) -> str:
    """Return why a worker is not used, for people."""
    if member.backoff_until > now:
        seconds = member.backoff_until - now
        return f"not used for {seconds:.0f} s, after {member.failure_count} failures"
    if member.state not in (MemberState.LOST, MemberState.REFUSED):
        return ""
    return member.reason.removeprefix(f"{member.address} is lost: ")  # the row shows the address
