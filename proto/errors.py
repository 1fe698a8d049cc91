"""The errors that users and peers see, and the exit code, gRPC status and HTTP status of each.

    ClusterError                    exit  gRPC                 HTTP
    ├── UsageError                  2     INVALID_ARGUMENT     400   a flag, file or value is wrong
    │   ├── CheckpointError         2     INVALID_ARGUMENT     400   a checkpoint's file or tensor is wrong
    │   ├── SpanError               2     INVALID_ARGUMENT     400   layers do not exist, overlap or leave a gap
    │   └── RequestError            2     INVALID_ARGUMENT     400   one field of a request; has `.param`
    ├── ProtocolError               1     INVALID_ARGUMENT     400   a frame or message is malformed
    │   └── VersionError            1     FAILED_PRECONDITION  409   peers use different protocol versions
    ├── StaleEpochError             1     ABORTED              409   a call or frame belongs to an older plan
    ├── CapacityError               1     RESOURCE_EXHAUSTED   429   temporarily full; has `.retry_after`
    ├── MemoryLimitError            1     RESOURCE_EXHAUSTED   507   no plan fits into the available memory
    ├── BusyError                   1     FAILED_PRECONDITION  409   a worker serves another coordinator
    ├── NotReadyError               1     UNAVAILABLE          503   no plan is serving yet
    ├── WorkerLostError             1     UNAVAILABLE          503   a worker died, stalled or left
    ├── DeadlineError               1     DEADLINE_EXCEEDED    504   a wait reached its limit
    └── AccessError                 1     PERMISSION_DENIED    403   the peer or key has no permission

A message says what failed, with which value, and what to do next. A message may contain a path of the
server. HTTP clients therefore get `.public`, which is the message unless the constructor sets another text.
"""

from __future__ import annotations


class ClusterError(Exception):
    """The base of all errors of this project. `str(error)` is one line for the user."""

    exit_code: int = 1
    grpc_status: str = "INTERNAL"
    http_status: int = 500

    def __init_subclass__(cls, grpc: str = "", http: int = 0) -> None:
        """Set the statuses with which a subclass is reported, if they differ from those of its base."""
        cls.grpc_status, cls.http_status = grpc or cls.grpc_status, http or cls.http_status

    def __init__(self, message: str, *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public


class UsageError(ClusterError, grpc="INVALID_ARGUMENT", http=400):
    """An invalid flag, file or value from the user."""

    exit_code = 2


class CheckpointError(UsageError):
    """A checkpoint's directory, config, file or tensor that is missing, truncated or of another architecture."""


class SpanError(UsageError):
    """A span that is empty, outside the model, overlaps another or leaves a gap."""


class RequestError(UsageError):
    """An invalid field of a request. `param` is its name as the client wrote it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ProtocolError(ClusterError, grpc="INVALID_ARGUMENT", http=400):
    """Bytes from a peer that are not a valid frame or message, or that arrive in the wrong order."""


class VersionError(ProtocolError, grpc="FAILED_PRECONDITION", http=409):
    """Different protocol versions of two processes. Both need the same release."""


class StaleEpochError(ClusterError, grpc="ABORTED", http=409):
    """A frame, signal or call of a plan that has been replaced."""


class CapacityError(ClusterError, grpc="RESOURCE_EXHAUSTED", http=429):
    """Temporarily full queues or memory. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class MemoryLimitError(ClusterError, grpc="RESOURCE_EXHAUSTED", http=507):
    """A model, or one stage of it, that does not fit into the available memory."""


class BusyError(ClusterError, grpc="FAILED_PRECONDITION", http=409):
    """A worker that serves another coordinator. The message names the coordinator."""


class NotReadyError(ClusterError, grpc="UNAVAILABLE", http=503):
    """A request while no plan serves: before the first plan, or after a recovery timed out."""


class WorkerLostError(ClusterError, grpc="UNAVAILABLE", http=503):
    """A worker that died, stalled or is unreachable."""


class DeadlineError(ClusterError, grpc="DEADLINE_EXCEEDED", http=504):
    """A wait that reached its deadline."""


class AccessError(ClusterError, grpc="PERMISSION_DENIED", http=403):
    """A call that the peer, its role or its key may not make."""
