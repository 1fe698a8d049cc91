"""The checks of signals from the coordinator to a worker and the backends of groups.

A signal saves time and never changes an outcome (DESIGN §3). A stage may apply it at any time, and any number of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from proto import cluster_pb2 as pb
from proto.errors import ProtocolError, VersionError
from proto.frame import MAX_FRAME_TOKENS, VERSION
from proto.wire import check_int, check_ints

MAX_STATUS_INTERVAL_MS = 60_000
"""Milliseconds. Bounds the interval of status messages: a worker that is silent for a minute counts as dead."""


@dataclass(frozen=True)
class Rollback:
    """The rejection of the last `trim` tokens of `window` and of every later window."""

    seq_id: int
    window: int
    trim: int

    def __post_init__(self) -> None:
        check_ints((self.seq_id, self.window), ("seq_id", "window"))
        check_int(self.trim, "trim", MAX_FRAME_TOKENS)

    def to_signal(self, epoch: int) -> pb.Signal:
        """Return the signal that carries this rollback."""
        rollback = pb.Rollback(seq_id=self.seq_id, window=self.window, trim=self.trim)
        return pb.Signal(epoch=epoch, rollback=rollback)


def check_signal(signal: pb.Signal) -> None:
    """Raise ProtocolError for an invalid signal, and VersionError for a hello of another protocol version."""
    kind = signal.WhichOneof("body")
    check_int(signal.epoch, "epoch")
    if kind == "hello":
        hello = signal.hello
        check_version(hello.protocol_version)
        if not 0 < hello.status_interval_ms <= MAX_STATUS_INTERVAL_MS:
            raise ProtocolError(f"hello: a status interval of {hello.status_interval_ms} ms")
    elif kind in ("rollback", "cancel"):
        if signal.epoch == 0:
            raise ProtocolError(f"{kind} outside any plan: epoch is 0")
        if kind == "rollback":
            Rollback(signal.rollback.seq_id, signal.rollback.window, signal.rollback.trim)
        else:
            check_int(signal.cancel.seq_id, "seq_id")
    elif kind != "heartbeat":
        raise ProtocolError("signal of an unknown kind. Install the same release on both sides")


def check_version(peer: int) -> None:
    """Raise VersionError unless the peer speaks this protocol version."""
    if peer != VERSION:
        raise VersionError(
            f"the peer uses protocol version {peer}, this process uses {VERSION}. "
            "Install the same release of mtp-cluster on both"
        )


class Backend(StrEnum):
    """MLX's backends for the collectives of a group, in a Load request."""

    ring = "ring"
    """TCP, on every machine."""
    jaccl = "jaccl"
    """RDMA over Thunderbolt 5, between two Macs."""
    nccl = "nccl"
    """NVIDIA GPUs."""
