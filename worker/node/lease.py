"""The lease: which coordinator a worker serves, and until when."""

from __future__ import annotations

import time
from dataclasses import dataclass

from proto import cluster_pb2 as pb
from proto.errors import BusyError, ProtocolError
from proto.rpc.grpc_text import printable

FIRST_LEASE = 10.0
"""Seconds of a lease whose coordinator has not set a duration."""


MAX_NAME = 128
"""Characters of a coordinator's id and name, which appear in logs and answers. Our coordinators send 16 for the id."""


@dataclass
class Lease:
    """The coordinator that this worker serves until `expires` (monotonic seconds)."""

    id: str
    name: str
    seconds: float = FIRST_LEASE
    expires: float = 0.0
    streams: int = 0
    """Number of open Signals streams. The lease ends with the last of them."""

    @property
    def lapsed(self) -> bool:
        """True after the lease has expired."""
        return time.monotonic() > self.expires

    def renew(self) -> None:
        """Extend the lease by its duration from now."""
        self.expires = time.monotonic() + self.seconds


def renewed_lease(
    held: Lease | None, worker: str, coordinator: pb.Coordinator, lease_ms: int
) -> Lease:
    """Return the renewed lease `held`, or a new lease of `worker` to `coordinator`.

    `lease_ms` 0 keeps the duration. Raises BusyError, which names the holder, if another coordinator has the lease, and
    ProtocolError for an invalid id.
    """
    if held is not None and held.id != coordinator.id:
        raise BusyError(f"worker {worker} serves coordinator {held.name or held.id}")
    if len(coordinator.id) > MAX_NAME or not coordinator.id.isprintable():
        raise ProtocolError("the coordinator's id is invalid")
    lease = held or Lease(coordinator.id, printable(coordinator.name, MAX_NAME))
    if lease_ms:
        lease.seconds = lease_ms / 1000
    lease.renew()
    return lease
