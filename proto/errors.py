"""Every error a user or a peer can see, and what it maps to.

    ClusterError                    exit  gRPC                 HTTP
    ├── UsageError                  2     INVALID_ARGUMENT     400   a flag, file or value is wrong
    │   ├── CheckpointError         2     INVALID_ARGUMENT     400   a checkpoint's file or tensor is wrong
    │   ├── SpanError               2     INVALID_ARGUMENT     400   layers do not exist, overlap or leave a gap
    │   └── RequestError            2     INVALID_ARGUMENT     400   one field of a request; has `.param`
    ├── ProtocolError               1     INVALID_ARGUMENT     400   a frame or message is malformed
    │   └── VersionError            1     FAILED_PRECONDITION  409   peers speak other protocol versions
    ├── StaleEpochError             1     ABORTED              409   it belongs to an older plan
    ├── CapacityError               1     RESOURCE_EXHAUSTED   429   full for now; has `.retry_after`
    ├── MemoryLimitError            1     RESOURCE_EXHAUSTED   507   no plan fits into the memory there is
    ├── BusyError                   1     FAILED_PRECONDITION  409   a worker serves another coordinator
    ├── NotReadyError               1     UNAVAILABLE          503   no plan is serving yet
    ├── WorkerLostError             1     UNAVAILABLE          503   a worker died, stalled or left
    ├── DeadlineError               1     DEADLINE_EXCEEDED    504   a wait reached its limit
    └── AccessError                 1     PERMISSION_DENIED    403   this peer or key may not do that

A message says what was wrong, where, and what to do next. It never holds a path of the server when it
goes to an HTTP client: `api` sends `.public`, which defaults to the message and may be set apart.
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of all our errors. `str(error)` is one line for the person at the terminal."""

    exit_code: int = 1
    grpc_status: str = "INTERNAL"
    http_status: int = 500

    def __init__(self, message: str, *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public


class UsageError(ClusterError):
    """A flag, a file or a value given by the user is wrong."""

    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class CheckpointError(UsageError):
    """A checkpoint's directory, config, file or tensor is missing, truncated or of another architecture."""


class SpanError(UsageError):
    """A span is empty, outside the model, overlapping another or leaving a gap."""


class RequestError(UsageError):
    """One field of a request is wrong. `param` is its name as the client wrote it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ProtocolError(ClusterError):
    """A peer sent bytes that are not a valid frame or message, or in the wrong order."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class VersionError(ProtocolError):
    """Two processes speak different protocol versions: install the same release on both."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class StaleEpochError(ClusterError):
    """A frame, signal or call belongs to a plan that has been replaced."""

    grpc_status = "ABORTED"
    http_status = 409


class CapacityError(ClusterError):
    """Queues or memory are full for now. `retry_after` is in seconds."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class MemoryLimitError(ClusterError):
    """The model, or one stage of it, does not fit into the memory there is."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 507


class BusyError(ClusterError):
    """A worker already serves another coordinator; the message names it."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class NotReadyError(ClusterError):
    """No plan is serving yet, or the cluster is recovering and the wait is over."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class WorkerLostError(ClusterError):
    """A worker died, stalled, or could not be reached, and no plan could go on without it."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class DeadlineError(ClusterError):
    """A wait reached its deadline."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class AccessError(ClusterError):
    """This peer, role or key may not make this call."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403
