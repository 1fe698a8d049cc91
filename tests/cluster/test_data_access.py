"""The access rules of data connections: a ticket of an open call, and the certificate of the caller."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proto.errors import AccessError, ClusterError, DeadlineError, WorkerLostError
from proto.frame import Frame, encode
from proto.rpc.data_connection import (
    FRAMES,
    TICKET_BYTES,
    StreamBinding,
    TicketOffer,
    dial,
)
from proto.rpc.link import LENGTH
from proto.trust.certificates import Role
from proto.trust.node_trust import NodeTrust
from tests.cluster.test_call_access import TOKEN, SecuredWorker, channel_of, secured_worker
from tests.support.processes.waits import until
from tests.support.trust.cluster_ca import expired_trust, make_authority, trust_of
from worker.node.node import Identity, LocalModels, WorkerNode
from worker.node.process import served

pytestmark = pytest.mark.smoke

DEADLINE = 20.0
SECONDS = 1.5


def trust_of_peer(worker: SecuredWorker, peer: str) -> NodeTrust | None:
    """Return the credentials of one kind of peer."""
    authority = worker.authority
    match peer:
        case "plaintext":
            return None
        case "other cluster":
            other = make_authority(authority.directory / "other")
            trust = trust_of(other, Role.WORKER, worker.previous)
            trust.authorities = authority.bundle
            return trust
        case "expired":
            return expired_trust(authority, Role.WORKER)
        case "coordinator":
            return trust_of(authority, Role.COORDINATOR)
        case "worker, not in the plan":
            return trust_of(authority, Role.WORKER)
        case _:
            return trust_of(authority, Role.WORKER, worker.previous)


@asynccontextmanager
async def worker_and_channel(folder: Path) -> AsyncIterator[tuple[SecuredWorker, Any]]:
    """Run a secured worker, and yield it with a channel of the previous stage."""
    async with (
        secured_worker(folder) as worker,
        channel_of(worker, "worker, previous stage") as channel,
        asyncio.timeout(DEADLINE),
    ):
        yield worker, channel


async def opened_call(channel: Any) -> tuple[Any, TicketOffer]:
    """Return an accepted call of the previous stage, and its ticket."""
    binding = StreamBinding(1, 1, TOKEN).to_metadata()
    call = channel.stream_stream(FRAMES)(metadata=binding)
    return call, TicketOffer.from_metadata(await call.initial_metadata())


def dialled(worker: SecuredWorker, trust: NodeTrust | None, offer: TicketOffer) -> Any:
    """Open a data connection on a thread."""
    return asyncio.to_thread(dial, worker.address, trust, "", offer, SECONDS)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the peer closes the connection within the deadline. Close it here too."""
    connection.settimeout(DEADLINE)
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionError:
            return True


@pytest.mark.parametrize("peer", ["plaintext", "other cluster", "expired", "coordinator", "worker, not in the plan"])
async def test_a_stolen_ticket_is_refused(peer: str, tmp_path: Path) -> None:
    """A ticket is worthless without the certificate of the node that it was given to. No frame is read."""
    async with worker_and_channel(tmp_path) as (worker, channel):
        call, offer = await opened_call(channel)
        with pytest.raises((WorkerLostError, AccessError, DeadlineError)):
            await dialled(worker, trust_of_peer(worker, peer), offer)
        assert (await call.code()).name == "PERMISSION_DENIED"
        assert worker.node.traffic.received.messages == 0


async def test_the_caller_sends_frames_until_it_is_removed(tmp_path: Path) -> None:
    """The node that made the call sends frames over TLS 1.3. Its removal closes the connection within a second."""
    async with worker_and_channel(tmp_path) as (worker, channel):
        _, offer = await opened_call(channel)
        trust = trust_of_peer(worker, "worker, previous stage")
        connection, figures = await dialled(worker, trust, offer)
        assert isinstance(connection, ssl.SSLSocket)
        assert connection.version() == "TLSv1.3"
        assert 0 < figures.seconds < SECONDS
        frame = encode(Frame(1, 0))
        connection.sendall(LENGTH.pack(len(frame)) + frame)
        await until(lambda: worker.node.traffic.received.messages == 1)
        worker.trust.install(worker.trust.authorities, worker.trust.removed | {worker.previous})
        async with asyncio.timeout(1.0):
            assert await asyncio.to_thread(is_closed, connection)


async def test_a_ticket_is_valid_once_and_while_its_call_is_open(tmp_path: Path) -> None:
    """Unknown tickets, used tickets and those of ended calls are refused before TLS begins."""
    async with worker_and_channel(tmp_path) as (worker, channel):
        trust = trust_of_peer(worker, "worker, previous stage")
        _, used = await opened_call(channel)
        connection, _ = await dialled(worker, trust, used)
        ended_call, ended = await opened_call(channel)
        ended_call.cancel()
        await until(lambda: not worker.node.tickets._issued)
        unknown = TicketOffer(bytes(TICKET_BYTES), used.port)
        for offer in (unknown, used, ended):
            with pytest.raises(ClusterError):
                await dialled(worker, trust, offer)
        connection.close()


async def test_a_client_refuses_another_node(tmp_path: Path) -> None:
    """A sender expects one node id in the receiver's certificate, and sends nothing to another worker."""
    async with worker_and_channel(tmp_path) as (worker, channel):
        _, offer = await opened_call(channel)
        trust = trust_of_peer(worker, "worker, previous stage")
        with pytest.raises(AccessError):
            await asyncio.to_thread(dial, worker.address, trust, "0" * 16, offer, SECONDS)
        assert worker.node.traffic.received.messages == 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_both_ports_of_every_interface_listen_on_both_families(tmp_path: Path) -> None:
    """gRPC listens on IPv4 and IPv6 for 0.0.0.0, so a coordinator that calls over IPv6 sends frames over it too."""
    node = WorkerNode(Identity("w", None, 2**30, LocalModels(None)))
    async with served(node, "0.0.0.0") as port:
        for host in ("127.0.0.1", "::1"):
            for each in (port, node.tickets.port):
                socket.create_connection((host, each), DEADLINE).close()
    await node.close()
