"""The memory that workers on the coordinator's machine use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from coordinator.cluster.manager import ClusterManager
from proto import cluster_pb2 as pb


def test_only_workers_on_this_machine_count() -> None:
    """Used and cached bytes of workers on loopback are added. Remote workers and workers without status are not."""
    clients: dict[str, Any] = {
        "127.0.0.1:1": SimpleNamespace(
            worker_status=pb.WorkerStatus(memory_used=5, memory_cached=2)
        ),
        "127.0.0.1:2": SimpleNamespace(worker_status=None),
        "203.0.113.9:1": SimpleNamespace(worker_status=pb.WorkerStatus(memory_used=100)),
    }
    manager = cast(ClusterManager, SimpleNamespace(membership=SimpleNamespace(clients=clients)))
    assert ClusterManager.local_worker_bytes(manager) == 7
