"""The start of the processes in which the members of a group hold their stages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from coordinator.pipeline.remote_pipeline import RemotePipeline
from coordinator.pipeline.worker_client import NOTICE_SHARE, WorkerClient
from proto import cluster_pb2 as pb
from proto.announcement import host_of, join_address
from proto.control import Backend
from proto.errors import ClusterError, NotReadyError, WorkerLostError
from proto.rpc.listener import BackgroundTasks
from proto.rpc.status_codes import printable

log = logging.getLogger(__name__)

MAX_FAULT = 300
"""Characters of the fault message of a process in logs and errors."""


STARTING_SECONDS = 10.0
"""Seconds. Least silence that loses a process before its stage serves. MLX holds Python's lock while it joins a group:
its `ring` waits 1 s and then 2 s for a member that comes later."""


class StartError(NotReadyError):
    """Failure to start a plan. `suspect` is the address of the worker to leave out, if one is known."""

    def __init__(self, reason: str, suspect: str | None) -> None:
        super().__init__(reason)
        self.suspect = suspect


def choose_backend(arithmetic: str, rdma: Sequence[str]) -> Backend:
    """Return the backend for equal machines. Each knows only one of the `rdma` devices, so jaccl joins pairs."""
    if arithmetic.startswith("cuda "):
        return Backend.nccl
    return Backend.jaccl if len(rdma) == 2 and all(rdma) else Backend.ring


@dataclass(eq=False)
class GroupStart:
    """The processes of one plan. They end when their clients are closed, because their leases end."""

    me: pb.Coordinator
    epoch: int
    failure_timeout: float
    lease_ms: int

    def __post_init__(self) -> None:
        self._replies: dict[str, pb.MemberReply] = {}
        """The address at which each member accepts the others, and its RDMA device, by the address of its worker."""
        self.clients: list[WorkerClient] = []
        self.pipeline: RemotePipeline | None = None
        """The pipeline that gets the statuses of the processes, once there is one."""
        self._background = BackgroundTasks()

    async def start(self, stages: Sequence[Sequence[WorkerClient]]) -> list[list[WorkerClient]]:
        """Start a process on every worker, and return their clients in the same places. Raises StartError."""
        workers = [worker for members in stages for worker in members]
        starts = [asyncio.create_task(self._start_one(worker)) for worker in workers]
        try:
            started = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        clients = iter(started)
        return [[next(clients) for _ in members] for members in stages]

    async def _start_one(self, worker: WorkerClient) -> WorkerClient:
        request = pb.MemberRequest(coordinator=self.me, epoch=self.epoch, lease_ms=self.lease_ms)
        try:
            reply = await worker.start_member(request)
        except ClusterError as error:
            raise StartError(str(error), worker.owner) from error
        address = join_address(host_of(worker.address), reply.port)
        client = WorkerClient(address, self.me, worker.trust, worker.node, worker.owner)
        self._replies[worker.owner] = reply
        client.starting_seconds = STARTING_SECONDS
        self.clients.append(client)
        worker.member = client
        on_status = partial(self._receive_status, client)
        client.watch(self.failure_timeout, on_status, partial(self._record_loss, client))
        return client

    def seat(self, members: Sequence[WorkerClient], rank: int, arithmetic: str) -> pb.Group:
        """Return the place of one of the `members` of a stage, which have equal `arithmetic`."""
        replies = [self._replies[member.owner] for member in members]
        hosts, rdma = [one.group_address for one in replies], [one.rdma for one in replies]
        backend = choose_backend(arithmetic, rdma)
        return pb.Group(rank=rank, hosts=hosts, backend=backend.value, rdma=rdma)

    def serve(self, pipeline: RemotePipeline) -> None:
        """Let `pipeline` have the processes, whose stages are loaded, and close their clients at its end."""
        self.pipeline, pipeline.owned = pipeline, tuple(self.clients)
        for client in self.clients:
            client.starting_seconds = 0.0

    async def close(self) -> None:
        """Close the clients, so that the processes end."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def _receive_status(self, client: WorkerClient, status: pb.WorkerStatus) -> None:
        pipeline = self.pipeline
        if status.engine_stall_ms / 1000 > NOTICE_SHARE * self.failure_timeout:
            self._record_loss(client, WorkerLostError("its engine is stuck"))
        elif pipeline is None or status.epoch != pipeline.epoch:
            return
        elif status.HasField("fault"):
            error = WorkerLostError(printable(status.fault.message, MAX_FAULT))
            pipeline.fail_member(client.owner, error, status.fault.peer)
        else:
            pipeline.record_worker_status(client.owner, status)

    def _record_loss(self, client: WorkerClient, error: ClusterError) -> None:
        """Fail the plan of a process that is lost. Its worker may be alive."""
        log.warning("process of a group lost", extra={"address": client.owner, "error": str(error)})
        if self.pipeline is not None:
            self.pipeline.fail_member(client.owner, error)
        else:  # ends the calls that wait for it
            client.failure = error
            self._background.spawn(client.close())
