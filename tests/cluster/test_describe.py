"""Workers are described over real gRPC before a plan uses them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.cluster.membership import member_of
from coordinator.pipeline.worker_client import Candidate, ConnectionPolicy, connect_worker
from proto import cluster_pb2 as pb
from proto.announcement import Announcement
from proto.errors import DeadlineError, VersionError, WorkerLostError
from proto.frame import VERSION
from proto.span import Span

pytestmark = pytest.mark.smoke

ME = pb.Coordinator(id="test", name="test")
MODEL = pb.ModelRef(fingerprint="f" * 64)


class FakeWorker:
    """A worker that answers only Describe."""

    def __init__(self, info: pb.WorkerInfo, delay: float = 0.0) -> None:
        self.info = info
        self.delay = delay

    async def describe(self, request: pb.DescribeRequest, _: object) -> pb.WorkerInfo:
        assert len(request.model.fingerprint) == 64
        await asyncio.sleep(self.delay)
        return self.info

    def handler(self) -> grpc.GenericRpcHandler:
        describe = grpc.unary_unary_rpc_method_handler(
            self.describe,
            request_deserializer=pb.DescribeRequest.FromString,
            response_serializer=pb.WorkerInfo.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("mtpcluster.v1.Worker", {"Describe": describe})


def info(worker_id: str, **changed: Any) -> pb.WorkerInfo:
    hardware = pb.Hardware(memory_limit=64 * 10**9, bytes_per_second=200e9)
    base: dict[str, Any] = {
        "protocol_version": VERSION,
        "name": f"name-{worker_id}",
        "fingerprint": "f" * 64,
        "hardware": hardware,
    }
    return pb.WorkerInfo(worker_id=worker_id, **(base | changed))


@contextlib.asynccontextmanager
async def serving(*workers: FakeWorker) -> AsyncIterator[list[str]]:
    """Yield the addresses of running fake workers."""
    servers, addresses = [], []
    try:
        for worker in workers:
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((worker.handler(),))
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            servers.append(server)
        yield addresses
    finally:
        for server in servers:
            await server.stop(0)


async def describe(candidate: Candidate, address: str, timeout: float = 30.0) -> pb.WorkerInfo:
    """Connect to a candidate at one address, and return its description."""
    client, found = await connect_worker(
        ConnectionPolicy(), candidate, address, ME, MODEL, timeout=timeout
    )
    await client.close()
    return found


async def test_a_worker_becomes_a_member() -> None:
    """The member has the reported memory, speed relative to 100 GB/s, and pinned layers."""
    worker = FakeWorker(info("a", pinned=pb.Span(start=0, end=4)))
    async with serving(worker) as (address,):
        found = await describe(Candidate(address, (address,)), address)
    member = member_of(address, found)
    assert (member.worker_id, member.name) == ("a", "name-a")
    assert (member.memory_limit, member.speed, member.pinned) == (64 * 10**9, 2.0, Span(0, 4))


async def test_a_worker_of_another_release_is_refused() -> None:
    """The error of a worker with another version of the protocol names the release."""
    async with serving(FakeWorker(info("old", protocol_version=VERSION + 1))) as (address,):
        with pytest.raises(VersionError, match="release"):
            await describe(Candidate(address, (address,)), address)


async def test_an_announced_worker_is_taken_only_at_its_own_address() -> None:
    """An announced address whose worker has another id is refused."""
    async with serving(FakeWorker(info("stranger")), FakeWorker(info("meant"))) as addresses:
        candidate = Candidate("i", tuple(addresses), Announcement("meant", "m", 1))
        with pytest.raises(WorkerLostError, match="another worker"):
            await describe(candidate, addresses[0])
        assert (await describe(candidate, addresses[1])).worker_id == "meant"


async def test_a_silent_worker_costs_a_bounded_wait() -> None:
    """A worker that accepts the call and never answers is refused after the deadline."""
    async with serving(FakeWorker(info("a"), delay=100.0)) as (address,), asyncio.timeout(60.0):
        with pytest.raises(DeadlineError, match="timed out"):
            await describe(Candidate(address, (address,)), address, timeout=0.3)
