"""Connections of a coordinator to a worker: closed during a call, and between programs with and without TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc.aio
import pytest

from coordinator.pipeline.worker_client import WorkerClient
from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy, connect_worker
from coordinator.trust.cluster_trust import JoinServer
from coordinator.trust.registry import Registry
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, WorkerLostError
from proto.rpc.channels import add_port
from proto.trust.certificates import Role
from proto.trust.node_trust import NodeTrust
from tests.support.processes.own_address import network_address
from tests.support.processes.stub_worker import StubMember, stub_members
from tests.support.processes.waits import until
from tests.support.trust.cluster_ca import make_authority, trust_of

PATIENCE = 20.0
"""Seconds. Deadline of each wait."""


class SilentWorker:
    """A worker with three calls, which begin and never end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def load(self, request: pb.LoadRequest, context: Any) -> AsyncIterator[pb.LoadProgress]:
        """Yield one progress message."""
        yield pb.LoadProgress(progress=pb.LoadBytes(done=1, total=2))
        self.begun.set()
        await asyncio.Event().wait()

    async def signals(self, requests: Any, context: Any) -> AsyncIterator[pb.WorkerStatus]:
        """Yield one status."""
        yield pb.WorkerStatus()
        self.begun.set()
        await asyncio.Event().wait()

    async def provide(self, requests: Any, context: Any) -> AsyncIterator[pb.WeightsReply]:
        """Yield nothing."""
        async for _ in requests:
            self.begun.set()
        await asyncio.Event().wait()
        yield pb.WeightsReply()


@pytest.fixture
async def worker() -> AsyncIterator[tuple[WorkerClient, SilentWorker]]:
    """Return a client and its silent worker."""
    service, server = SilentWorker(), grpc.aio.server()
    methods: dict[str, Any] = {
        "Load": grpc.unary_stream_rpc_method_handler(
            service.load, pb.LoadRequest.FromString, pb.LoadProgress.SerializeToString
        ),
        "Signals": grpc.stream_stream_rpc_method_handler(
            service.signals, pb.Signal.FromString, pb.WorkerStatus.SerializeToString
        ),
        "Provide": grpc.stream_stream_rpc_method_handler(
            service.provide, pb.Weights.FromString, pb.WeightsReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("mtpcluster.v1.Worker", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = WorkerClient(f"127.0.0.1:{port}", pb.Coordinator(id="c", name="c"))
    yield client, service
    await client.close()
    await server.stop(0)


def _load(client: WorkerClient) -> asyncio.Task[Any]:
    return asyncio.create_task(client.load(pb.LoadRequest(), lambda done, total: None))


def _provide(client: WorkerClient) -> asyncio.Task[Any]:
    def answer(wanted: pb.WantedTensors) -> AsyncIterator[pb.Weights]:
        raise NotImplementedError

    return asyncio.create_task(client.provide(pb.WeightsOffer(), answer, lambda done, total: None))


@pytest.mark.parametrize("call", [_load, _provide])
@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_a_closed_connection_is_a_lost_worker(
    worker: tuple[WorkerClient, SilentWorker], call: Any, end: str
) -> None:
    """gRPC cancels the calls of a closed channel. A caller that is not cancelled gets an error with the address."""
    client, service = worker
    task = call(client)
    await asyncio.wait_for(service.begun.wait(), PATIENCE)
    if end == "closed":
        await client.close()
    else:
        task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE)
    if end == "cancelled":
        assert task.cancelled()
    else:
        with pytest.raises(WorkerLostError, match=client.address):
            task.result()


async def test_a_worker_that_starts_may_be_silent_for_longer(
    worker: tuple[WorkerClient, SilentWorker],
) -> None:
    """A process that joins a group is not lost by the failure timeout, but by the longer one."""
    client, service = worker
    lost: list[Any] = []
    client.starting_seconds = 1.2
    client.watch(0.2, lambda status: None, lost.append)
    await asyncio.wait_for(service.begun.wait(), PATIENCE)
    began = time.monotonic()
    await asyncio.sleep(0.5)
    assert not lost
    await until(lambda: lost, "the loss")
    assert "was silent for 1.2 s" in str(lost[0])
    assert time.monotonic() - began > 1.0


async def test_a_status_that_fails_loses_its_worker() -> None:
    """After a bug here nobody would watch the worker, and its loss would go unnoticed."""
    worker, lost = StubMember("a", "f"), list[Any]()
    with stub_members(worker):
        client = WorkerClient(worker.address, pb.Coordinator(id="c", name="c"))
        client.watch(5.0, MagicMock(side_effect=TypeError), lost.append)
        await until(lambda: lost, "the loss")
        await client.close()
    assert "its status failed: TypeError" in str(lost[0])


@pytest.fixture
def host() -> str:
    """Return an IPv4 address of this machine that is not loopback."""
    return network_address()


@asynccontextmanager
async def listening(host: str, trust: NodeTrust | None) -> AsyncIterator[str]:
    """Run a gRPC server with the TLS of `trust`, and yield its address."""
    server = grpc.aio.server()
    port = add_port(server, f"{host}:0", trust)
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(0)


async def problem(address: str, policy: ConnectionPolicy) -> str:
    """Return the error of a connection to the worker at `address`."""
    me, model = pb.Coordinator(id="c", name="test"), pb.ModelRef(name="m")
    with pytest.raises(ClusterError) as raised:
        await connect_worker(policy, Candidate(address, (address,)), address, me, model, 5.0)
    return str(raised.value)


async def test_a_missing_or_unexpected_tls_is_named(host: str, tmp_path: Path) -> None:
    """Each mistake in a pair of coordinator and worker has words of its own, without the library's."""
    mine, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    secured = ConnectionPolicy(trust_of(mine, Role.COORDINATOR))
    insecure = ConnectionPolicy(None, insecure=True)
    cases = [
        (None, secured, "has no TLS, so it has not joined the cluster"),
        (trust_of(other, Role.WORKER), secured, "of another cluster, or expired"),
        (trust_of(mine, Role.WORKER), insecure, "start this coordinator without --insecure"),
    ]
    for trust, policy, words in cases:
        async with listening(host, trust) as address:
            text = await problem(address, policy)
        assert words in text
        assert address in text
        assert "SSL" not in text
    async with JoinServer(mine, Registry(tmp_path / "a")).listening(host, 0) as port:
        assert "another program listens there" in await problem(f"{host}:{port}", secured)
