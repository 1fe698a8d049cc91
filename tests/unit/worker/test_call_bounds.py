"""Calls of a stranger to a worker without a cluster: bounded by size, silence and number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.frame import VERSION
from proto.rpc import listener
from proto.rpc.channels import add_port, open_channel
from proto.rpc.listener import MAX_CONTROL_BYTES, MAX_TRANSFERS
from worker.node.node import MAX_NAME, Identity, LocalModels, WorkerNode
from worker.node.service import make_server

DEADLINE = 30.0


@asynccontextmanager
async def open_worker() -> AsyncIterator[tuple[WorkerNode, grpc.aio.Channel]]:
    """Run a worker without a cluster in this process, and yield it and a channel of a stranger."""
    node = WorkerNode(Identity("w", None, 2**30, LocalModels(None)))
    server = make_server(node)
    port = add_port(server, "127.0.0.1:0", None)
    await server.start()
    try:
        async with asyncio.timeout(DEADLINE), open_channel(f"127.0.0.1:{port}", None) as channel:
            yield node, channel
    finally:
        await server.stop(0)
        await node.close()


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """Return the error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def test_huge_control_calls_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A Describe or Connect with a name of megabytes is refused with its size, and no log line repeats it."""
    huge = pb.ModelRef(name="x" * (2 * MAX_CONTROL_BYTES))
    me = pb.Coordinator(id="c", name="x" * (2 * MAX_CONTROL_BYTES))
    async with open_worker() as (node, channel):
        stub = pb_grpc.WorkerStub(channel)
        calls = (
            stub.Describe(pb.DescribeRequest(protocol_version=VERSION, model=huge)),
            stub.Connect(pb.ConnectRequest(coordinator=me)),
        )
        for call in calls:
            details = (await refusal(call)).details() or ""
            assert str(MAX_CONTROL_BYTES) in details
            assert len(details) < 200
        assert node.lease is None
    assert len(caplog.text) < 5000


async def test_a_long_name_of_a_lease_is_cut() -> None:
    """A lease keeps a bounded, printable name of its coordinator, and an invalid id gets no lease."""
    async with open_worker() as (node, channel):
        stub = pb_grpc.WorkerStub(channel)
        for wrong in ("", "c" * (MAX_NAME + 1), "line\nbreak"):
            stream: Any = stub.Provide()
            await stream.write(pb.Weights(offer=pb.WeightsOffer(coordinator=pb.Coordinator(id=wrong))))
            assert "id is invalid" in ((await refusal(stream.read())).details() or "")
        node.renew_lease(pb.Coordinator(id="c", name="\x1b[31m" + "x" * 100_000))
        assert node.lease is not None
        assert len(node.lease.name) <= MAX_NAME
        assert node.lease.name.isprintable()


async def test_silent_streams_end_and_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of 70 silent Provide calls wait for a short time, and the worker answers others meanwhile."""
    monkeypatch.setattr(listener, "FIRST_MESSAGE_SECONDS", 1.0)
    async with open_worker() as (_, channel):
        stub = pb_grpc.WorkerStub(channel)
        silent: list[Any] = [stub.Provide() for _ in range(70)]
        silent += [stub.Signals() for _ in range(5)]
        ends = [asyncio.ensure_future(call.code()) for call in silent]
        assert (await stub.Describe(pb.DescribeRequest(protocol_version=VERSION))).name == "w"
        assert not all(end.done() for end in ends[:70])
        await asyncio.gather(*ends)
        details = [str(await call.details()) for call in silent]
    waited = [text for text in details if "no message within 1 s" in text]
    assert len(waited) == MAX_TRANSFERS + 5
