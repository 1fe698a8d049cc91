"""Which coordinator a worker serves, and for how long without a word from it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from proto import cluster_pb2 as pb
from proto.errors import BusyError

FIRST_LEASE = 10.0
"""Seconds a claim lasts whose coordinator has not said how long."""


@dataclass
class Lease:
    """The coordinator this worker serves, until `expires` (monotonic seconds) unless it speaks again."""

    id: str
    name: str
    seconds: float = FIRST_LEASE
    expires: float = 0.0
    streams: int = 0
    """Signals streams open. With the last of them the claim ends; an older one that ends late ends nothing."""

    @property
    def lapsed(self) -> bool:
        return time.monotonic() > self.expires

    def renew(self) -> None:
        self.expires = time.monotonic() + self.seconds


def renewed_lease(
    held: Lease | None, worker: str, coordinator: pb.Coordinator, lease_ms: int
) -> Lease:
    """The claim of `worker` after `coordinator` spoke: a new one, or the one `held`, renewed. A lease of 0: none said.

    Raises BusyError, naming the holder, when it is another's.
    """
    if held is not None and held.id != coordinator.id:
        raise BusyError(f"worker {worker} serves coordinator {held.name or held.id}")
    lease = held or Lease(coordinator.id, coordinator.name)
    if lease_ms:
        lease.seconds = lease_ms / 1000
    lease.renew()
    return lease
