"""Signals from the coordinator to a worker, as range-checked plain data and as protobuf messages.

A signal saves time and never changes an outcome (DESIGN §3). A stage may apply it before or after the
frame that carries the same information, and any number of times, and ends in the same state.
"""

from __future__ import annotations

from dataclasses import dataclass

from proto import cluster_pb2 as pb
from proto.errors import ProtocolError, VersionError
from proto.frame import MAX_FRAME_TOKENS, MAX_INT, VERSION

MAX_STATUS_INTERVAL_MS = 60_000
"""Milliseconds. Bounds the interval of status messages: a worker that is silent for a minute counts as dead."""

MAX_SIGNAL_BYTES = 128
"""Maximum bytes of a rollback on the wire, gRPC's framing included (promise 2 of DESIGN §1)."""

_MAX_NAME = 128


@dataclass(frozen=True)
class Hello:
    """The first signal of a stream: the coordinator, and the interval at which it expects a worker status."""

    coordinator_id: str
    coordinator_name: str
    status_interval_ms: int

    def __post_init__(self) -> None:
        if not 0 < len(self.coordinator_id) <= _MAX_NAME or len(self.coordinator_name) > _MAX_NAME:
            raise ProtocolError(f"hello: coordinator id and name have 1 to {_MAX_NAME} characters")
        _within("status_interval_ms", self.status_interval_ms, 1, MAX_STATUS_INTERVAL_MS)


@dataclass(frozen=True)
class Heartbeat:
    """A sign that the coordinator is alive."""


@dataclass(frozen=True)
class Rollback:
    """The rejection of the last `trim` tokens of `window` and of every later window.

    `accepted_length` tokens of the window remain. It is 0 for an invalidated window.
    """

    seq_id: int
    window: int
    accepted_length: int
    trim: int

    def __post_init__(self) -> None:
        _within("seq_id", self.seq_id, 0, MAX_INT)
        _within("window", self.window, 0, MAX_INT)
        _within("accepted_length", self.accepted_length, 0, MAX_FRAME_TOKENS)
        _within("trim", self.trim, 0, MAX_FRAME_TOKENS - self.accepted_length)

    @property
    def width(self) -> int:
        """Number of tokens of the window before the rollback."""
        return self.accepted_length + self.trim


@dataclass(frozen=True)
class Cancel:
    """The cancellation of a sequence. The worker skips its queued segments."""

    seq_id: int

    def __post_init__(self) -> None:
        _within("seq_id", self.seq_id, 0, MAX_INT)


Body = Hello | Heartbeat | Rollback | Cancel


@dataclass(frozen=True)
class Signal:
    """A body and its epoch. A hello and a heartbeat belong to no plan and have epoch 0."""

    epoch: int
    body: Body

    def __post_init__(self) -> None:
        _within("epoch", self.epoch, 0, MAX_INT)
        if self.epoch == 0 and isinstance(self.body, (Rollback, Cancel)):
            raise ProtocolError(f"{type(self.body).__name__.lower()} outside any plan: epoch is 0")


def to_message(signal: Signal) -> pb.Signal:
    """Return `signal` as its protobuf message."""
    match signal.body:
        case Hello(coordinator_id, name, status_interval_ms):
            hello = pb.Hello(
                coordinator=pb.Coordinator(id=coordinator_id, name=name),
                protocol_version=VERSION,
                status_interval_ms=status_interval_ms,
            )
            return pb.Signal(epoch=signal.epoch, hello=hello)
        case Heartbeat():
            return pb.Signal(epoch=signal.epoch, heartbeat=pb.Heartbeat())
        case Rollback(seq_id, window, accepted_length, trim):
            rollback = pb.Rollback(
                seq_id=seq_id, window=window, accepted_length=accepted_length, trim=trim
            )
            return pb.Signal(epoch=signal.epoch, rollback=rollback)
        case Cancel(seq_id):
            return pb.Signal(epoch=signal.epoch, cancel=pb.Cancel(seq_id=seq_id))


def from_message(message: pb.Signal) -> Signal:
    """Invert `to_message`.

    Raises ProtocolError for a value out of range or an unknown kind, and VersionError for a hello of
    another protocol version.
    """
    body: Body
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            check_version(hello.protocol_version)
            body = Hello(hello.coordinator.id, hello.coordinator.name, hello.status_interval_ms)
        case "heartbeat":
            body = Heartbeat()
        case "rollback":
            r = message.rollback
            body = Rollback(r.seq_id, r.window, r.accepted_length, r.trim)
        case "cancel":
            body = Cancel(message.cancel.seq_id)
        case _:
            raise ProtocolError("signal of an unknown kind. Install the same release on both sides")
    return Signal(message.epoch, body)


def check_version(peer: int) -> None:
    """Raise VersionError unless the peer speaks this protocol version."""
    if peer != VERSION:
        raise VersionError(
            f"the peer uses protocol version {peer}, this process uses {VERSION}. "
            "Install the same release of mtp-cluster on both"
        )


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ProtocolError(f"signal: {name} {value} is outside {low} to {high}")
