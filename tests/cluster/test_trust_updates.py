"""Renewal, rotation and removal reach a connected worker, in one process with real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from coordinator.pipeline.worker_client import WorkerClient
from coordinator.trust.authority import Authority
from coordinator.trust.cluster_trust import ClusterTrust
from coordinator.trust.keys import KeyRing
from proto import cluster_pb2 as pb
from proto.rpc.channels import add_port
from proto.trust.certificates import Role, from_pem, new_id, renewal_time, utc_now
from proto.trust.node_trust import NodeTrust
from tests.support.processes.waits import until
from tests.support.trust.cluster_ca import trust_of
from worker.node.node import Identity, LocalModels, WorkerNode
from worker.node.service import make_server

pytestmark = pytest.mark.smoke


@asynccontextmanager
async def watched_worker(
    state: Path, life: timedelta = timedelta(days=30)
) -> AsyncIterator[tuple[ClusterTrust, NodeTrust, list[frozenset[str]]]]:
    """Run a worker and a coordinator's trust that watches it. The worker's certificate lives for `life`.

    Yield the cluster, the worker's trust, and the list of removals that the coordinator applied.
    """
    cluster = ClusterTrust.open(state, create=True)
    assert cluster is not None
    trust = trust_of(cluster.authority, Role.WORKER)
    trust.certificate = cluster.authority.issue(trust.key.public_key(), trust.identity, life=life)
    cluster.registry.record_node(trust.identity.node, "mac-2", 0.0)
    node = WorkerNode(Identity("w", None, 2**30, LocalModels(None), trust=trust))
    server = make_server(node)
    port = add_port(server, "127.0.0.1:0", trust)
    await server.start()
    me = pb.Coordinator(id="me", name="test")
    client = WorkerClient(f"127.0.0.1:{port}", me, cluster.trust, trust.identity.node)
    removals: list[frozenset[str]] = []
    watching = asyncio.create_task(cluster.watch(lambda: [client], removals.append))
    try:
        yield cluster, trust, removals
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await client.close()
        await server.stop(0)
        await node.close()


async def test_an_old_certificate_is_renewed(tmp_path: Path) -> None:
    """A worker gets a new certificate after two thirds of the old one's life, and the registry knows its end."""
    async with watched_worker(tmp_path, timedelta(seconds=30)) as (cluster, trust, _):
        old = trust.certificate
        assert utc_now() > renewal_time(from_pem(old)[0]), "the clock skew ages a short certificate"
        await until(lambda: trust.certificate != old)
        assert trust.due_request() == ""
        (node,) = cluster.registry.nodes()
        assert (node.name, node.expires > 0) == ("mac-2", True)


async def test_a_worker_learns_url_and_key_of_the_server(tmp_path: Path) -> None:
    """They are in a private file of its state directory, for the commands there."""
    KeyRing(tmp_path).admit_machines("https://10.0.0.1:8080", frozenset())
    async with watched_worker(tmp_path) as (_, trust, _):
        trust.directory = tmp_path / "worker"
        file = tmp_path / "worker" / "server.json"
        await until(file.exists)
        key = json.loads((tmp_path / "keys" / "machines.json").read_text())["key"]
        assert json.loads(file.read_text()) == {"url": "https://10.0.0.1:8080", "key": key}
        assert file.stat().st_mode & 0o777 == 0o600


async def test_a_rotation_reaches_the_worker(tmp_path: Path) -> None:
    """After `ca rotate` in another process, the worker accepts the new authority and has a certificate of it."""
    async with watched_worker(tmp_path) as (_, trust, removals):
        await until(lambda: removals)
        command = Authority.open(tmp_path)
        assert command is not None
        command.rotate()
        await until(lambda: trust.authorities == command.bundle and not trust.due_request())
        assert from_pem(trust.certificate)[0].issuer == command.certificates[0].subject


async def test_an_unreadable_registry_does_not_end_the_removals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A removal that a command wrote reaches coordinator and worker within a second once the registry can be read.

    While it cannot be read, the coordinator says so once.
    """
    async with watched_worker(tmp_path) as (cluster, trust, removals):
        await until(lambda: removals)
        lost = new_id()
        cluster.registry.record_node(lost, "mac-3", 0.0)
        cluster.registry.remove_nodes("mac-3")
        file = tmp_path / "authority" / "registry.json"
        right = file.read_text()
        file.write_text("{")
        waits = "removals and renewals wait"
        await until(lambda: waits in caplog.messages)
        await asyncio.sleep(0.5)
        assert caplog.messages.count(waits) == 1
        file.write_text(right)
        async with asyncio.timeout(1.0):
            await until(lambda: lost in removals[-1] and lost in trust.removed)
