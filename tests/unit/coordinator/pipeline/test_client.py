"""Calls of a coordinator to a worker whose connection is closed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from coordinator.pipeline.worker_client import WorkerClient
from proto import cluster_pb2 as pb
from proto.errors import WorkerLostError
from tests.support.processes.waits import until

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
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("mtpcluster.v1.Worker", methods),)
    )
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
async def test_a_closed_connection_is_a_lost_worker(
    worker: tuple[WorkerClient, SilentWorker], call: Any
) -> None:
    """gRPC cancels the calls of a closed channel. A caller that is not cancelled gets an error with the address."""
    client, service = worker
    task = call(client)
    await asyncio.wait_for(service.begun.wait(), PATIENCE)
    await client.close()
    with pytest.raises(WorkerLostError, match=client.address):
        await asyncio.wait_for(task, PATIENCE)


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


@pytest.mark.parametrize("call", [_load, _provide])
async def test_a_cancelled_caller_stays_cancelled(
    worker: tuple[WorkerClient, SilentWorker], call: Any
) -> None:
    """Its own cancellation is no error of the worker."""
    client, service = worker
    task = call(client)
    await asyncio.wait_for(service.begun.wait(), PATIENCE)
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE)
    assert task.cancelled()
