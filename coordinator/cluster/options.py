"""Options of the cluster manager, as set on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.cluster.view import Settings
from coordinator.workers.connection import ConnectionPolicy
from proto import cluster_pb2 as pb


@dataclass(frozen=True)
class ManagerOptions:
    """Options of one ClusterManager.

    `addresses` are always tried as workers; `mdns` looks for more. A worker is lost after `failure_timeout` seconds of
    silence, of a hop that takes no frame, or of an engine that makes no progress. `policy` decides which workers the
    coordinator connects to.
    """

    me: pb.Coordinator
    settings: Settings
    addresses: tuple[str, ...] = ()
    mdns: bool = False
    failure_timeout: float = 3.0
    policy: ConnectionPolicy = field(default_factory=ConnectionPolicy)
