"""Connections between programs with and without TLS: refused in words that name the mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy, connect_worker
from coordinator.trust.cluster_trust import JoinServer
from coordinator.trust.registry import Registry
from proto import cluster_pb2 as pb
from proto.errors import ClusterError
from proto.rpc.channels import add_port
from proto.trust.certificates import Role
from proto.trust.node_trust import NodeTrust
from tests.support.processes.own_address import network_address
from tests.support.trust.cluster_ca import make_authority, trust_of


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
