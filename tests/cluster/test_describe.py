"""Workers are described over real gRPC before a plan uses them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.planning.plan import NodeSpec
from coordinator.workers import describe
from coordinator.workers.connection import ConnectionPolicy
from coordinator.workers.describe import describe_all
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.announcement import Announcement
from proto.frame import VERSION
from proto.span import Span
from tests.support.checkpoints.checkpoints import write_checkpoint

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


def named(*addresses: str) -> list[Candidate]:
    return [Candidate(address, (address,)) for address in addresses]


async def test_a_worker_becomes_a_node() -> None:
    """The node has the reported memory, speed relative to 100 GB/s, and pinned layers."""
    worker = FakeWorker(info("a", pinned=pb.Span(start=0, end=4)))
    async with serving(worker) as addresses:
        (answer,) = await describe_all(named(*addresses), MODEL, ME, ConnectionPolicy())
    assert answer.node == NodeSpec("name-a", 64 * 10**9, 2.0, Span(0, 4))
    assert answer.reason == ""


async def test_unusable_workers_come_with_a_reason() -> None:
    """A worker with another checkpoint or release, one that leaves, and a silent address are left out with a reason."""
    workers = (
        FakeWorker(info("other", fingerprint="e" * 64)),
        FakeWorker(info("old", protocol_version=VERSION + 1)),
        FakeWorker(info("leaving", state=pb.WORKER_STATE_DRAINING)),
        FakeWorker(info("good")),
    )
    async with serving(*workers) as addresses:
        answers = await describe_all(
            named(*addresses, "127.0.0.1:1"), MODEL, ME, ConnectionPolicy()
        )
    reasons = [answer.reason for answer in answers]
    for reason, expected in zip(
        reasons, ["another checkpoint", "release", "leaving", "", "127.0.0.1:1"], strict=True
    ):
        assert expected in reason
    assert [answer.node is not None for answer in answers] == [False, False, False, True, False]


async def test_one_worker_under_two_addresses_counts_once() -> None:
    """A worker under two addresses counts once, with its memory."""
    async with serving(FakeWorker(info("a")), FakeWorker(info("a"))) as addresses:
        answers = await describe_all(named(*addresses), MODEL, ME, ConnectionPolicy())
    assert [answer.address for answer in answers] == [addresses[0]]


async def test_an_announced_worker_is_taken_only_at_its_own_address() -> None:
    """Among announced addresses, the one whose worker has the announced id is used."""
    async with serving(FakeWorker(info("stranger")), FakeWorker(info("meant"))) as addresses:
        announced = Announcement("meant", "m", 1)
        (answer,) = await describe_all(
            [Candidate("i", tuple(addresses), announced)], MODEL, ME, ConnectionPolicy()
        )
        gone = Announcement("gone", "g", 1)
        (missing,) = await describe_all(
            [Candidate("j", tuple(addresses), gone)], MODEL, ME, ConnectionPolicy()
        )
    assert answer.address == addresses[1]
    assert missing.node is None
    assert missing.reason


async def test_a_silent_worker_costs_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that accepts the call and never answers is left out after the deadline."""
    async with serving(FakeWorker(info("a"), delay=100.0), FakeWorker(info("b"))) as addresses:
        for seconds in (0.3, 1.0, 10.0):  # on a busy machine the quick one may take some, too
            monkeypatch.setattr(describe, "ASK_SECONDS", seconds)
            async with asyncio.timeout(60.0):
                slow, quick = await describe_all(named(*addresses), MODEL, ME, ConnectionPolicy())
            assert slow.node is None
            assert "timed out" in slow.reason
            if quick.node is not None:
                break
    assert quick.node is not None


async def test_the_plan_command_plans_with_those_who_answer(tmp_path: Path) -> None:
    """--worker asks workers. Equal names get their address, and workers left out are shown with the reason."""
    path = write_checkpoint(tmp_path / "m")
    workers = [FakeWorker(info(i, name="mac", fingerprint="")) for i in ("a", "b")]
    workers.append(FakeWorker(info("c", name="other", fingerprint="e" * 64)))
    async with serving(*workers) as addresses:
        flags = [flag for address in addresses for flag in ("--worker", address)]
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["plan", str(path), "--json", *flags], catch_exceptions=False
        )
    facts = json.loads(result.stdout)
    nodes = {stage["node"] for stage in facts["stages"]}
    assert nodes == {f"mac {addresses[0]}", f"mac {addresses[1]}"}
    assert list(facts["refused"]) == [addresses[2]]
    assert "another checkpoint" in facts["refused"][addresses[2]]
