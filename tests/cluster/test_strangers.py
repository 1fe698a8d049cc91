"""Attacks on a secured worker. None has an effect without the coordinator's certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from huggingface_hub import constants

from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.frame import VERSION
from tests.cluster.test_call_access import (
    ME,
    REFUSED,
    SEND_FAILED,
    SecuredWorker,
    channel_of,
    secured_worker,
)
from worker.node.node import WorkerNode

STRANGERS = ("plaintext", "other cluster", "removed", "worker, not in the plan")
DEADLINE = 20.0


async def refused(call: Any) -> str:
    """Return the text of a call that must be refused: no path, and nothing about the request."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(DEADLINE):
            await call
    error = raised.value
    # A stream that the worker has closed fails in the client's own write.
    own_write = SEND_FAILED in (error.debug_error_string() or "")
    assert own_write or error.code().name in REFUSED
    return error.details() or ""


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that holds everything a worker writes for a coordinator."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "hub"


async def leave_weights(worker: SecuredWorker, peer: str) -> str:
    """Offer a wrong tensor of 1 GB under the fingerprint of a real checkpoint."""
    model = Checkpoint.open(checkpoint_dir())
    config = (model.path / "config.json").read_text()
    tensor = pb.OfferedTensor(name="model.norm.weight", dtype="F32", shape=[2**28], file="x")
    offer = pb.WeightsOffer(
        coordinator=ME,
        model=pb.ModelRef(name="m", fingerprint=model.fingerprint()),
        config=config,
        layout="mlx",
        tensors=[tensor],
        share=True,
    )
    async with channel_of(worker, peer) as channel:
        stream: Any = pb_grpc.WorkerStub(channel).Provide()
        await _write(stream, pb.Weights(offer=offer))
        return await refused(stream.read())


async def _write(stream: Any, message: Any) -> None:
    """Write a message to a stream that may be refused already."""
    try:
        await stream.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the read reports it


async def test_weights_of_a_stranger_are_not_stored(copies: Path, tmp_path: Path) -> None:
    """No stranger fills the disk, or leaves weights under a real fingerprint, through Provide."""
    async with secured_worker(tmp_path) as worker:
        for peer in STRANGERS:
            await leave_weights(worker, peer)
        assert not await asyncio.to_thread(copies.exists)
        assert worker.node.lease is None


async def test_a_stranger_makes_no_worker_dial(tmp_path: Path) -> None:
    """Connect of a stranger does not open a connection to the address in it."""
    dialled: list[str] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append("dialled")
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with secured_worker(tmp_path, stage=0) as worker, server:
        port = server.sockets[0].getsockname()[1]
        request = pb.ConnectRequest(
            coordinator=ME,
            epoch=1,
            stage=0,
            num_stages=2,
            next_address=f"127.0.0.1:{port}",
            next_worker_id="w2",
            plan_token=bytes(16),
        )
        for peer in STRANGERS:
            async with channel_of(worker, peer) as channel:
                await refused(pb_grpc.WorkerStub(channel).Connect(request))
        assert not dialled


async def test_a_forged_signal_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger cancels and rolls back nothing, with any epoch and sequence."""
    applied: list[Any] = []
    monkeypatch.setattr(WorkerNode, "apply_signal", lambda node, signal: applied.append(signal))
    hello = pb.Hello(coordinator=ME, protocol_version=VERSION, status_interval_ms=50)
    async with secured_worker(tmp_path) as worker:
        for peer in STRANGERS:
            async with channel_of(worker, peer) as channel:
                stream: Any = pb_grpc.WorkerStub(channel).Signals()
                for body in (
                    pb.Signal(hello=hello),
                    pb.Signal(epoch=1, cancel=pb.Cancel(seq_id=1)),
                    pb.Signal(epoch=1, rollback=pb.Rollback(seq_id=1)),
                ):
                    await _write(stream, body)
                await refused(stream.read())
        assert not applied


async def test_a_refusal_has_no_path(tmp_path: Path) -> None:
    """A stranger that asks for files learns neither whether they exist nor any path of this machine."""
    async with secured_worker(tmp_path) as worker:
        for peer in STRANGERS:
            async with channel_of(worker, peer) as channel:
                stub = pb_grpc.WorkerStub(channel)
                texts = set()
                for path in (str(checkpoint_dir()), "/no/such/folder", str(Path.home())):
                    model = pb.ModelRef(path=path, name=path, fingerprint="f" * 64)
                    ask = pb.DescribeRequest(protocol_version=VERSION, model=model)
                    load: Any = stub.Load(pb.LoadRequest(coordinator=ME, epoch=2, model=model))
                    texts |= {await refused(stub.Describe(ask)), await refused(load.read())}
            for text in texts:
                assert str(Path.home()) not in text
                assert str(tmp_path) not in text
                assert "folder" not in text
