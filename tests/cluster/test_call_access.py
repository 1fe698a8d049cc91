"""The access rules of a secured worker: every RPC by every kind of peer, compared with the table of rules."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.trust.authority import Authority
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.frame import VERSION
from proto.rpc.channels import open_channel
from proto.rpc.data_connection import FRAMES, RESULTS, StreamBinding, Ticket
from proto.trust.certificates import NodeIdentity, Role, host_name, new_id
from proto.trust.node_trust import NodeTrust
from tests.support.trust.cluster_ca import expired_trust, make_authority, trust_of
from worker.node.binding import Binding, Place
from worker.node.node import Identity, LocalModels, WorkerNode
from worker.node.process import served

pytestmark = pytest.mark.smoke

DEADLINE = 20.0
TOKEN = bytes(16)
ME = pb.Coordinator(id="coordinator", name="test")
UNARY = {
    "Describe": pb.DescribeRequest(protocol_version=VERSION),
    "Connect": pb.ConnectRequest(coordinator=ME),
    "ConnectRing": pb.RingRequest(coordinator=ME),
    "StartMember": pb.MemberRequest(coordinator=ME, epoch=1),
    "Unload": pb.UnloadRequest(coordinator=ME),
    "ReportTrace": pb.TraceRequest(),
    "ReportState": pb.StateReportRequest(coordinator=ME),
}
CONTROL = (
    *UNARY, "UpdateTrust", "Load", "Provide", "Signals", "ReadBackup", "WriteBackup", "FindPrefix", "LoadPrefix",
    "ReadBlocks",
)  # fmt: skip
METHODS = (*CONTROL, FRAMES, RESULTS)
REFUSED = {"UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED"}

SEND_FAILED = "SendMessageOperation"
"""gRPC's name of a write, in the error of one that failed."""
"""The statuses that a peer receives when the handshake or the check of its call fails."""


@dataclass
class SecuredWorker:
    """A worker that serves stage 1 of 2, its cluster, the previous stage's node and a removed node."""

    authority: Authority
    trust: NodeTrust
    node: WorkerNode
    address: str = ""
    previous: str = field(default_factory=new_id)
    removed: str = field(default_factory=new_id)


@asynccontextmanager
async def secured_worker(folder: Path, stage: int = 1) -> AsyncIterator[SecuredWorker]:
    """Run a secured worker in this process, bound as stage `stage` of 2."""
    authority = make_authority(folder)
    trust = trust_of(authority, Role.WORKER)
    node = WorkerNode(Identity("w", None, 2**30, LocalModels(None), trust=trust))
    worker = SecuredWorker(authority, trust, node)
    trust.removed = frozenset({worker.removed})
    place = Place(1, stage, 2, TOKEN, worker.previous if stage else "")
    node.binding = Binding(place, node.host, node.traffic, lambda: None)
    node.binding.bound = True
    async with served(node, "127.0.0.1") as port:
        worker.address = f"127.0.0.1:{port}"
        yield worker
    await node.close()


async def call(channel: grpc.aio.Channel, method: str, stage: int = 1, authorities: str = "") -> str:
    """Make one call and return the name of its status, OK if the server accepted it."""
    stub = pb_grpc.WorkerStub(channel)
    binding = StreamBinding(1, stage, TOKEN).to_metadata()
    try:
        async with asyncio.timeout(DEADLINE):
            if method in UNARY:
                await getattr(stub, method)(UNARY[method])
            elif method == "UpdateTrust":
                await stub.UpdateTrust(pb.TrustUpdate(authorities=authorities))
            elif method == "Load":
                await anext(aiter(stub.Load(pb.LoadRequest(coordinator=ME, epoch=1))))
            elif method == "ReadBackup":
                await anext(aiter(stub.ReadBackup(pb.BackupRequest(coordinator=ME, epoch=1))))
            elif method == "ReadBlocks":
                await anext(aiter(stub.ReadBlocks(pb.BlockRequest(coordinator=ME, epoch=1))))
            elif method == "WriteBackup":
                head = pb.BackupPiece(head=pb.BackupHead(coordinator=ME, epoch=1))
                await stub.WriteBackup(iter([head]))
            elif method in ("FindPrefix", "LoadPrefix"):
                await getattr(stub, method)(iter([pb.PrefixRequest(coordinator=ME, epoch=1)]))
            elif method == "Provide":
                await _first(stub.Provide(), pb.Weights(offer=pb.WeightsOffer(coordinator=ME)))
            elif method == "Signals":
                hello = pb.Hello(coordinator=ME, protocol_version=VERSION, status_interval_ms=100)
                await _first(stub.Signals(), pb.Signal(hello=hello))
            elif method == FRAMES:
                frames: Any = channel.stream_stream(FRAMES)(metadata=binding)
                await frames.initial_metadata()
                if frames.done():
                    return str((await frames.code()).name)
                frames.cancel()
            else:
                open_results: Any = channel.unary_stream(RESULTS)
                results = open_results(b"", metadata=binding)
                await results.initial_metadata()
                if results.done():
                    return str((await results.code()).name)
                results.cancel()
    except grpc.aio.AioRpcError as error:
        classes = dict(error.trailing_metadata() or ()).get("mtp-error")
        answered = classes is not None and classes != "AccessError"  # the call reached its method
        # A stream that the worker has closed fails in the client's own write.
        closed = SEND_FAILED in (error.debug_error_string() or "")
        return "OK" if answered else "UNAVAILABLE" if closed else str(error.code().name)
    return "OK"


async def _first(stream: Any, message: Any) -> None:
    await stream.write(message)
    assert await stream.read() is not None
    stream.cancel()


def channel_of(worker: SecuredWorker, peer: str) -> grpc.aio.Channel:
    """Return a channel to the worker as one kind of peer."""
    authority = worker.authority
    options = (("grpc.ssl_target_name_override", worker.trust.identity.host_names[0]),)
    match peer:
        case "plaintext":
            return grpc.aio.insecure_channel(worker.address)
        case "no certificate":
            roots = grpc.ssl_channel_credentials(authority.bundle.encode())
            return grpc.aio.secure_channel(worker.address, roots, options=options)
        case "other cluster":
            other = make_authority(authority.directory / "other")
            trust = trust_of(other, Role.COORDINATOR)
            pair = trust.key_pem.encode(), trust.certificate.encode()
            credentials = grpc.ssl_channel_credentials(authority.bundle.encode(), *pair)
            return grpc.aio.secure_channel(worker.address, credentials, options=options)
        case "expired":
            return open_channel(worker.address, expired_trust(authority, Role.COORDINATOR))
        case "removed":
            return open_channel(worker.address, trust_of(authority, Role.COORDINATOR, worker.removed))
        case "worker, not in the plan":
            return open_channel(worker.address, trust_of(authority, Role.WORKER))
        case "worker, previous stage":
            return open_channel(worker.address, trust_of(authority, Role.WORKER, worker.previous))
        case _:
            return open_channel(worker.address, trust_of(authority, Role.COORDINATOR))


def is_permitted(peer: str, method: str) -> bool:
    """Return what the rules say: the coordinator controls, and the previous stage sends frames."""
    if peer == "worker, previous stage":
        return method == FRAMES
    return peer == "coordinator" and method != FRAMES


@pytest.mark.parametrize(
    "peer",
    [
        "plaintext",
        "no certificate",
        "other cluster",
        "expired",
        "removed",
        "worker, not in the plan",
        "worker, previous stage",
        "coordinator",
    ],
)
async def test_every_call_by_every_peer(peer: str, tmp_path: Path) -> None:
    """Each call is refused before it has an effect, unless the table of the rules permits it to the peer."""
    async with secured_worker(tmp_path) as worker:
        for method in METHODS:
            before = (worker.node.lease, worker.node.epoch, worker.node.traffic.received.messages)
            async with channel_of(worker, peer) as channel:
                status = await call(channel, method, authorities=worker.authority.bundle)
                worker.trust.removed = frozenset({worker.removed})
            if is_permitted(peer, method):
                assert status not in REFUSED, (method, status)
            else:
                assert status in REFUSED, (method, status)
                traffic = worker.node.traffic.received.messages
                assert (worker.node.lease, worker.node.epoch, traffic) == before, method
            place = Place(1, 1, 2, TOKEN, worker.previous)
            worker.node.release()
            worker.node.binding = Binding(place, worker.node.host, worker.node.traffic, lambda: None)
            worker.node.binding.bound = True


async def test_the_coordinator_sends_the_frames_of_stage_0(tmp_path: Path) -> None:
    """At stage 0 the coordinator may send frames, and no worker may."""
    async with secured_worker(tmp_path, stage=0) as worker:
        async with channel_of(worker, "coordinator") as channel:
            assert await call(channel, FRAMES, stage=0) == "OK"
        for peer in ("worker, not in the plan", "worker, previous stage"):
            async with channel_of(worker, peer) as channel:
                assert await call(channel, FRAMES, stage=0) == "PERMISSION_DENIED"


async def test_every_method_is_tried() -> None:
    """These tests know every method of the service."""
    service = pb.DESCRIPTOR.services_by_name["Worker"]
    control = {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert {f"/{service.full_name}/{name}" for name in CONTROL} == control


async def test_a_client_refuses_another_node(tmp_path: Path) -> None:
    """A client expects one node id. Another worker of the same cluster at that address gets nothing."""
    async with secured_worker(tmp_path) as worker:
        mine = trust_of(worker.authority, Role.COORDINATOR)
        own = worker.trust.identity.node
        async with open_channel(worker.address, mine, own) as channel:
            assert await call(channel, "Describe") == "OK"
        async with open_channel(worker.address, mine, new_id()) as channel:
            assert await call(channel, "Describe") == "UNAVAILABLE"


@pytest.mark.parametrize("opened", [True, False])
async def test_removal_ends_open_calls(tmp_path: Path, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a removed node ends within a second, and its next call is refused on the same connection.

    This holds while gRPC sends its metadata, too.
    """
    async with (
        secured_worker(tmp_path) as worker,
        channel_of(worker, "worker, previous stage") as channel,
    ):
        removed = worker.trust.removed | {worker.previous}
        remove = partial(worker.trust.install, worker.trust.authorities, removed)
        issued = worker.node.tickets.issued

        def remove_soon(peer: NodeIdentity | None) -> AbstractContextManager[Ticket]:
            asyncio.get_running_loop().call_soon(remove)
            return issued(peer)

        if not opened:
            monkeypatch.setattr(worker.node.tickets, "issued", remove_soon)
        binding = StreamBinding(1, 1, TOKEN).to_metadata()
        frames: Any = channel.stream_stream(FRAMES)(metadata=binding)
        if opened:
            await frames.initial_metadata()
            assert not frames.done()
            remove()
        async with asyncio.timeout(1.0):
            assert (await frames.code()).name != "OK"
        assert await call(channel, FRAMES) == "PERMISSION_DENIED"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls_is_1_3(version: ssl.TLSVersion, tmp_path: Path) -> None:
    """The worker completes a handshake of TLS 1.3 and of no other version."""
    async with secured_worker(tmp_path) as worker:
        trust = trust_of(worker.authority, Role.COORDINATOR)
        pem = tmp_path / "client.pem"
        pem.write_text(trust.key_pem + trust.certificate)
        context = ssl.create_default_context(cadata=worker.authority.bundle)
        context.load_cert_chain(pem)
        context.set_alpn_protocols(["h2"])
        context.minimum_version = context.maximum_version = version

        def handshake() -> str | None:
            """Return the version of a completed handshake."""
            host, port = worker.address.split(":")
            name = host_name(worker.authority.cluster, Role.WORKER)
            with (
                socket.create_connection((host, int(port)), timeout=DEADLINE) as plain,
                context.wrap_socket(plain, server_hostname=name) as secured,
            ):
                return secured.version()

        if version is ssl.TLSVersion.TLSv1_3:
            assert await asyncio.to_thread(handshake) == "TLSv1.3"
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(handshake)
