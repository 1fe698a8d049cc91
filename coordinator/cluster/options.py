"""How a cluster is looked for, watched and waited for: what the command line decides."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cluster.view import Settings
from proto import cluster_pb2 as pb


@dataclass(frozen=True)
class ManagerOptions:
    """`failure_timeout`: seconds of silence, of a hop that takes nothing, or of an engine that does nothing, that
    make a worker lost. `addresses` are asked whether or not anyone announces them; `mdns` looks for others."""

    me: pb.Coordinator
    settings: Settings
    addresses: tuple[str, ...] = ()
    mdns: bool = False
    failure_timeout: float = 3.0
