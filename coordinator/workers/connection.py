"""The rule which candidates the coordinator connects to, and how."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coordinator.workers.client import DESCRIBE_SECONDS, WorkerClient
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.address import host_of, is_loopback
from proto.errors import AccessError, WorkerLostError
from proto.rpc.grpc_text import CLOSED
from proto.rpc.network_interface import route_to
from proto.trust.node_trust import NodeTrust


@dataclass(frozen=True)
class ConnectionPolicy:
    """The coordinator's rule for connections to workers.

    A worker at a loopback address runs on this machine; its connection is not secured. Every other worker must prove
    that it belongs to the cluster of `trust`. `insecure` accepts any worker instead, without encryption.
    """

    trust: NodeTrust | None = None
    insecure: bool = False

    def trust_for(self, candidate: Candidate, address: str) -> NodeTrust | None:
        """Return the trust for a connection to `candidate` at `address`, None for a connection without TLS.

        Raises AccessError for a candidate that the rule excludes.
        """
        announced = candidate.announcement.cluster if candidate.announcement else ""
        if is_loopback(host_of(address)) and not announced:
            return None
        if self.insecure:
            if announced:
                raise AccessError(
                    f"{address} accepts only its cluster. Start this coordinator without --insecure"
                )
            return None
        if self.trust is None:
            raise AccessError(
                f"{address} is on another machine and this coordinator has no cluster. Start mtp-coord serve "
                "with --listen and let the worker join, or use --insecure on both"
            )
        if candidate.announcement is not None and announced != self.trust.identity.cluster:
            state = "belongs to another cluster" if announced else "has not joined the cluster"
            raise AccessError(
                f"{address} {state}. Start it with --join and a token of this cluster"
            )
        if candidate.node in self.trust.removed:
            raise AccessError(f"{address} was removed from the cluster")
        return self.trust


async def connect_worker(
    policy: ConnectionPolicy,
    candidate: Candidate,
    address: str,
    me: pb.Coordinator,
    model: pb.ModelRef,
    timeout: float = DESCRIBE_SECONDS,
) -> tuple[WorkerClient, pb.WorkerInfo]:
    """Return a client for the worker at `address` and its description.

    A secured client accepts only the worker's node id from then on. Raises AccessError for a worker that `policy`
    excludes, WorkerLostError for an address of another worker, and the errors of Describe.
    """
    trust = policy.trust_for(candidate, address)
    node = candidate.node if trust is not None else ""
    client, info = await _describe(address, me, trust, node, model, timeout)
    try:
        if trust is not None and info.node_id in trust.removed:
            raise AccessError(f"{address} was removed from the cluster")
        if trust is not None and not node:  # the user named the address, so the node id was unknown
            await client.close()
            client, info = await _describe(address, me, trust, info.node_id, model, timeout)
        announced = candidate.announcement
        if announced is not None and announced.worker_id != info.worker_id:
            raise WorkerLostError(f"{address} belongs to another worker than the announced one")
        _, client.route_kind = await asyncio.to_thread(route_to, host_of(address))
    except BaseException:
        await client.close()
        raise
    return client, info


async def _describe(
    address: str,
    me: pb.Coordinator,
    trust: NodeTrust | None,
    node: str,
    model: pb.ModelRef,
    timeout: float,
) -> tuple[WorkerClient, pb.WorkerInfo]:
    client = WorkerClient(address, me, trust, node)
    try:
        return client, await client.describe(model, timeout=timeout)
    except WorkerLostError as error:
        await client.close()
        if trust is None and CLOSED in str(error):
            raise WorkerLostError(
                f"{error}. A worker that belongs to a cluster requires TLS: start this coordinator without --insecure"
            ) from error
        raise
    except BaseException:
        await client.close()
        raise
