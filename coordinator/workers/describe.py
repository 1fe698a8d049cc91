"""Asks workers who they are, once, for commands that look and do not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.model_costs import REFERENCE_BANDWIDTH
from coordinator.planning.plan import NodeSpec
from coordinator.workers.client import WorkerClient
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.errors import ClusterError
from proto.span import Span

ASK_SECONDS = 10.0
"""For one answer; a worker that looks a large checkpoint up on a cold disk takes seconds."""


@dataclass(frozen=True)
class DescribeResult:
    """What became of one candidate: a node to plan with, or the reason why not."""

    address: str
    worker_id: str = ""
    node: NodeSpec | None = None
    reason: str = ""


async def ask_all(
    candidates: Sequence[Candidate], model: pb.ModelRef, me: pb.Coordinator
) -> list[DescribeResult]:
    """One answer a worker, in the order of `candidates`; those who are the same worker answer once."""
    answers = await asyncio.gather(*(_ask_one(c, model, me) for c in candidates))
    found: dict[str, DescribeResult] = {}
    for answer in answers:
        found.setdefault(answer.worker_id or answer.address, answer)
    return list(found.values())


def node_of(info: pb.WorkerInfo) -> NodeSpec:
    """A worker as the planner sees it. One that has measured nothing has the speed of most."""
    pinned = Span(info.pinned.start, info.pinned.end) if info.HasField("pinned") else None
    speed = info.hardware.bytes_per_second / REFERENCE_BANDWIDTH or 1.0
    return NodeSpec(info.name, info.hardware.memory_limit, speed, pinned)


async def _ask_one(candidate: Candidate, model: pb.ModelRef, me: pb.Coordinator) -> DescribeResult:
    """Ask a candidate at its addresses, one after another, until the worker meant answers."""
    announced = candidate.announcement
    answer = DescribeResult(candidate.addresses[0], reason="does not answer")
    for address in candidate.addresses:
        client = WorkerClient(address, me)
        try:
            info = await client.describe(model, timeout=ASK_SECONDS)
            if announced is None or announced.worker_id == info.worker_id:
                return _judge(address, info, model)
        except ClusterError as error:
            answer = DescribeResult(candidate.addresses[0], reason=str(error))
        finally:
            await client.close()
    return answer


def _judge(address: str, info: pb.WorkerInfo, model: pb.ModelRef) -> DescribeResult:
    reason = ""
    if info.fingerprint and info.fingerprint != model.fingerprint:
        reason = f"{info.name} has another checkpoint ({info.model or 'of the same name'})"
    elif info.state == pb.WORKER_STATE_DRAINING:
        reason = f"{info.name} is leaving"
    return DescribeResult(address, info.worker_id, None if reason else node_of(info), reason)
