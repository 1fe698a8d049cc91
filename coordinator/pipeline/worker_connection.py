"""The connection to a worker: its possible addresses, the coordinator's rule for TLS, and the checks of both."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.pipeline.worker_client import DESCRIBE_SECONDS, WorkerClient
from proto import cluster_pb2 as pb
from proto.announcement import JOIN_FLAG, Announcement, host_of, is_loopback
from proto.errors import AccessError, WorkerLostError
from proto.rpc.status_codes import CLOSED
from proto.trust.node_trust import NodeTrust


@dataclass(frozen=True)
class Candidate:
    """The possible addresses of one worker. `id` is the mDNS instance, or the address that the user named.

    `addresses` are host:port, the most likely first. The address whose Describe returns `announcement.worker_id`
    is the worker's. `announcement` is None for an address that the user named.
    """

    id: str
    addresses: tuple[str, ...]
    announcement: Announcement | None = None

    @property
    def name(self) -> str:
        """The announced name, or the address."""
        return self.announcement.name if self.announcement else self.addresses[0]

    @property
    def node(self) -> str:
        """The announced node id, which only a handshake verifies; empty if unknown."""
        return self.announcement.node if self.announcement else ""


@dataclass(frozen=True)
class ConnectionPolicy:
    """The coordinator's rule for connections to workers.

    A worker at a loopback address runs on this machine; its connection is secured if it has joined. Every other one
    must prove that it belongs to the cluster of `trust`. `insecure` accepts any worker instead, without encryption.
    """

    trust: NodeTrust | None = None
    insecure: bool = False

    def trust_for(self, candidate: Candidate, address: str) -> NodeTrust | None:
        """Return the trust for a connection, None for one without TLS. Raises AccessError for an excluded worker."""
        announced = candidate.announcement.cluster if candidate.announcement else ""
        if is_loopback(host_of(address)) and not announced:
            return None
        if self.insecure:
            if announced:
                raise AccessError(f"{address} accepts only its cluster. Start this coordinator without --insecure")
            return None
        if self.trust is None:
            where = "of a cluster" if announced else "on another machine"
            raise AccessError(
                f"{address} is a worker {where}, and this coordinator has no cluster. Start mtp-coord serve with "
                "--listen, or with --state-dir of that cluster"
            )
        if candidate.announcement is not None and announced != self.trust.identity.cluster:
            state = "belongs to another cluster" if announced else "has not joined the cluster"
            raise AccessError(f"{address} {state}. Start it with {JOIN_FLAG}")
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
    refusal: str = "",
) -> tuple[WorkerClient, pb.WorkerInfo]:
    """Return a client for the worker at `address` and its description.

    A secured client accepts only the worker's node id from then on. Raises AccessError for a worker that `policy`
    excludes, WorkerLostError for an address of another worker, and the errors of Describe.
    """

    async def described(trust: NodeTrust | None, node: str) -> tuple[WorkerClient, pb.WorkerInfo]:
        client = WorkerClient(address, me, trust, node)
        try:
            return client, await client.describe(model, timeout, refusal)
        except BaseException:
            await client.close()
            raise

    trust = policy.trust_for(candidate, address)
    node = candidate.node if trust is not None else ""
    try:
        client, info = await described(trust, node)
    except WorkerLostError as error:
        if trust is not None or CLOSED not in str(error):
            raise
        if policy.trust is None:
            raise WorkerLostError(
                f"{error}. A worker that belongs to a cluster requires TLS: start this coordinator without --insecure"
            ) from error
        trust = policy.trust  # a worker of this machine that has joined
        client, info = await described(trust, node)
    try:
        if trust is not None and info.node_id in trust.removed:
            raise AccessError(f"{address} was removed from the cluster")
        if trust is not None and not node:  # the user named the address, so the node id was unknown
            await client.close()
            client, info = await described(trust, info.node_id)
        announced = candidate.announcement
        if announced is not None and announced.worker_id != info.worker_id:
            raise WorkerLostError(f"{address} belongs to another worker than the announced one")
    except BaseException:
        await client.close()
        raise
    return client, info
