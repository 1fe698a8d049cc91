"""One Describe call to each candidate, for commands that show the workers and do not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.model_costs import REFERENCE_BANDWIDTH
from coordinator.planning.plan import NodeSpec
from coordinator.workers.connection import ConnectionPolicy, connect_worker
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.errors import ClusterError
from proto.span import Span

ASK_SECONDS = 10.0
"""Seconds. Bounds one reply: the fingerprint of a large checkpoint on a cold disk takes seconds."""


@dataclass(frozen=True)
class DescribeResult:
    """The result for one candidate: a node to plan with, or the reason why it cannot be used."""

    address: str
    worker_id: str = ""
    node: NodeSpec | None = None
    reason: str = ""
    arithmetic: str = ""
    """Name of the machine's arithmetic. Machines with equal names give the same bits."""


async def describe_all(
    candidates: Sequence[Candidate],
    model: pb.ModelRef,
    me: pb.Coordinator,
    policy: ConnectionPolicy,
) -> list[DescribeResult]:
    """Return one result per worker, in the order of `candidates`. Candidates that are one worker are merged."""
    results = await asyncio.gather(*(_describe(c, model, me, policy) for c in candidates))
    found: dict[str, DescribeResult] = {}
    for result in results:
        found.setdefault(result.worker_id or result.address, result)
    return list(found.values())


def node_of(info: pb.WorkerInfo) -> NodeSpec:
    """Return a worker as the planner needs it. A worker that has not measured its speed has the speed 1."""
    pinned = Span(info.pinned.start, info.pinned.end) if info.HasField("pinned") else None
    speed = info.hardware.bytes_per_second / REFERENCE_BANDWIDTH or 1.0
    return NodeSpec(info.name, info.hardware.memory_limit, speed, pinned)


async def _describe(
    candidate: Candidate, model: pb.ModelRef, me: pb.Coordinator, policy: ConnectionPolicy
) -> DescribeResult:
    """Call Describe at the candidate's addresses, one after another, until the announced worker replies."""
    result = DescribeResult(candidate.addresses[0], reason="does not answer")
    for address in candidate.addresses:
        try:
            client, info = await connect_worker(
                policy, candidate, address, me, model, timeout=ASK_SECONDS
            )
        except ClusterError as error:
            result = DescribeResult(candidate.addresses[0], reason=str(error))
            continue
        await client.close()
        return _result(address, info, model)
    return result


def _result(address: str, info: pb.WorkerInfo, model: pb.ModelRef) -> DescribeResult:
    reason = ""
    if info.fingerprint and info.fingerprint != model.fingerprint:
        reason = f"{info.name} has another checkpoint ({info.model or 'of the same name'})"
    elif info.state == pb.WORKER_STATE_DRAINING:
        reason = f"{info.name} is leaving"
    node = None if reason else node_of(info)
    return DescribeResult(address, info.worker_id, node, reason, info.hardware.arithmetic)
