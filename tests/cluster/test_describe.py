"""Workers are described over real gRPC before a plan uses them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.cluster.membership import member_of
from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy, connect_worker
from proto import cluster_pb2 as pb
from proto.announcement import Announcement
from proto.errors import DeadlineError, WorkerLostError
from proto.span import Span
from tests.support.processes.stub_worker import StubMember, stub_members

pytestmark = pytest.mark.smoke

ME = pb.Coordinator(id="test", name="test")
MODEL = pb.ModelRef(fingerprint="f" * 64)


def stub(worker_id: str, **fields: Any) -> StubMember:
    """Return a worker with the files of the model, whose description has these fields."""
    return StubMember(worker_id, MODEL.fingerprint, fields=fields)


async def describe(address: str, announced: Announcement | None = None, timeout: float = 30.0) -> pb.WorkerInfo:
    """Connect to a worker, which may be announced, and return its description."""
    candidate = Candidate(address, (address,), announced)
    client, found = await connect_worker(ConnectionPolicy(), candidate, address, ME, MODEL, timeout=timeout)
    await client.close()
    return found


async def test_a_worker_becomes_a_member() -> None:
    """The member has the reported memory, speed relative to 100 GB/s, and pinned layers."""
    worker = stub("a", name="name-a", pinned=pb.Span(start=0, end=4))
    with stub_members(worker):
        found = await describe(worker.address)
    member = member_of(worker.address, found)
    assert (member.worker_id, member.name) == ("a", "name-a")
    assert (member.memory_limit, member.speed, member.pinned) == (2**40, 2.0, Span(0, 4))


async def test_an_announced_worker_is_taken_only_at_its_own_address() -> None:
    """An announced address whose worker has another id is refused."""
    stranger, meant = stub("stranger"), stub("meant")
    announced = Announcement("meant", "m", 1)
    with stub_members(stranger, meant):
        with pytest.raises(WorkerLostError, match="another worker"):
            await describe(stranger.address, announced)
        assert (await describe(meant.address, announced)).worker_id == "meant"


async def test_a_silent_worker_costs_a_bounded_wait() -> None:
    """A worker that accepts the call and never answers is refused after the deadline."""
    worker = stub("a")
    worker.may_answer.clear()
    with stub_members(worker):
        async with asyncio.timeout(20.0):
            with pytest.raises(DeadlineError, match="timed out"):
                await describe(worker.address, timeout=0.3)
