"""Strangers and renewals at the port of a secured worker, a real process at a network address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.trust.cluster_trust import ClusterTrust
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.frame import VERSION
from proto.rpc.channels import FIRST_MESSAGE_SECONDS, open_channel, tls_context
from proto.trust.certificates import Role, from_pem, host_name, identity_of
from proto.trust.node_trust import NodeTrust
from tests.cluster.test_join import host as host
from tests.support.processes.processes import ending, launch_worker

CONNECTIONS = 1000
"""Half handshakes. A configuration for every connection let a worker live for 204 of them."""

OPEN_AT_ONCE = 30
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(5)
DEADLINE = 120.0


async def half_handshake(address: tuple[str, int], wait: float) -> None:
    """Send the beginning of a ClientHello and leave `wait` seconds later."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(*address)
        writer.write(CLIENT_HELLO)
        with contextlib.suppress(OSError):
            await writer.drain()
            await asyncio.sleep(wait)
        writer.transport.abort()


async def strangers(address: tuple[str, int]) -> None:
    """Make CONNECTIONS half handshakes, OPEN_AT_ONCE of them at once, with random ends."""
    chance = random.Random(7)
    waits = [chance.uniform(0, 0.02) for _ in range(CONNECTIONS)]
    places = asyncio.Semaphore(OPEN_AT_ONCE)

    async def visit(wait: float) -> None:
        async with places:
            await half_handshake(address, wait)

    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(visit(wait) for wait in waits))


async def describe(address: str, trust: NodeTrust) -> pb.WorkerInfo:
    """Ask the worker at `address` for its description, over a new connection."""
    channel: grpc.aio.Channel = open_channel(address, trust)
    async with channel:
        request = pb.DescribeRequest(protocol_version=VERSION)
        answer: pb.WorkerInfo = await pb_grpc.WorkerStub(channel).Describe(request, timeout=20)
        return answer


@contextlib.asynccontextmanager
async def joined_worker(host: str, folder: Path) -> AsyncIterator[tuple[ClusterTrust, str]]:
    """Run a worker that has joined a cluster. Yield the cluster and the worker's address. At the end it runs."""
    cluster = ClusterTrust.open(folder / "state", create=True)
    assert cluster is not None
    async with cluster.listening(host, 0):  # has the token with which a worker of this user joins
        worker = launch_worker(folder, "mac-1", "--listen", f"{host}:0", "--state-dir", str(folder / "state"))
        ready = await asyncio.to_thread(worker.wait_for, "worker ready")
    with ending(worker):
        yield cluster, str(ready["address"])
        assert worker.running, worker.text()[-2000:]
        raw = [line for line in worker.text().splitlines() if not line.startswith("{")]
        assert raw == [], "gRPC's own lines would fill the log"


HELD = 1000
"""Half handshakes that are open at once. They end by the deadline of the worker, not by their number."""

HANDSHAKE_SECONDS = FIRST_MESSAGE_SECONDS + 5
MEMBER_SECONDS = 1.0


async def test_open_half_handshakes_delay_no_member(host: str, tmp_path: Path) -> None:
    """Members connect within a second while strangers hold connections, which end after the deadline."""
    async with joined_worker(host, tmp_path) as (cluster, address):
        name, _, port = address.rpartition(":")
        held = [await asyncio.open_connection(name, int(port)) for _ in range(HELD)]
        for _, writer in held:
            writer.write(CLIENT_HELLO)
        waits = []
        for _ in range(10):
            began = time.monotonic()
            assert (await describe(address, cluster.trust)).name == "mac-1"
            waits.append(time.monotonic() - began)
        assert statistics.median(waits) < MEMBER_SECONDS, waits
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            ends = await asyncio.gather(*(end_of(reader) for reader, _ in held))
        assert ends == [True] * HELD
        for _, writer in held:
            writer.transport.abort()


async def end_of(reader: asyncio.StreamReader) -> bool:
    """Wait until the peer ends a connection, by closing or by aborting it."""
    with contextlib.suppress(ConnectionError):
        await reader.read()
    return True


RENEWALS = 60


def peer_certificate(address: str, trust: NodeTrust) -> x509.Certificate:
    """Return the certificate that a new connection to the worker gets."""
    context = tls_context(trust, server=False)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    name = host_name(trust.identity.cluster, Role.WORKER)
    with (
        socket.create_connection((host, int(port)), DEADLINE) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")


@pytest.mark.smoke
async def test_strangers_and_renewals_lose_no_connection(host: str, tmp_path: Path) -> None:
    """Connections succeed while a worker's certificate is renewed, and strangers leave in mid-handshake."""
    async with joined_worker(host, tmp_path) as (cluster, address):
        authority, trust = cluster.authority, cluster.trust
        name, _, port = address.rpartition(":")
        visits = asyncio.create_task(strangers((name, int(port))))
        first = await asyncio.to_thread(peer_certificate, address, trust)
        key, identity = first.public_key(), identity_of(first)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        channel: grpc.aio.Channel = open_channel(address, trust)
        async with channel:
            stub = pb_grpc.WorkerStub(channel)
            for _ in range(RENEWALS):
                chain = authority.issue(key, identity)
                update = pb.TrustUpdate(authorities=authority.bundle, certificate=chain)
                await stub.UpdateTrust(update, timeout=20)
                found = await asyncio.to_thread(peer_certificate, address, trust)
                assert found == from_pem(chain)[0]
                assert (await describe(address, trust)).name == "mac-1"
        await visits
