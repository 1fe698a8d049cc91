"""Errors of this project as gRPC statuses, and texts of other machines made safe for logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from proto import errors
from proto.announcement import JOIN_FLAG, host_of
from proto.errors import ClusterError
from proto.local_network import NO_ROUTE, with_advice

MAX_CHARACTERS = 200
"""Characters of a text that has no plain words. A peer may have chosen it."""

_ANOTHER_PROGRAM = "another program listens there. Give the address of an mtp-worker, not a port of a coordinator"

CLOSED = "the connection was closed"
"""The text for a connection that the peer closed. A peer that requires TLS closes a connection without it."""

NO_MEMBERS = (
    f"it has no TLS, so it has not joined the cluster. Start it with {JOIN_FLAG}",
    f"its certificate is of another cluster, or expired. Start it with {JOIN_FLAG}",
    "it is another node of the cluster than expected",
)
"""The texts for peers that do not prove to be the expected member of the cluster."""

_PLAIN = {
    NO_MEMBERS[0]: "WRONG_VERSION_NUMBER",
    NO_MEMBERS[1]: "CERTIFICATE_VERIFY_FAILED",
    NO_MEMBERS[2]: "Hostname Verification",
    _ANOTHER_PROGRAM: "ALPN|http1.x|HTTP/2|http2 header with status",
    "connection refused": "Connection refused",
    NO_ROUTE: NO_ROUTE,
    "network is unreachable": "Network is unreachable",
    "host name not found": "Domain name not found|DNS resolution failed|hostname lookup error",
    "connection timed out": "timed out",
    CLOSED: "Socket closed|Connection reset|Broken pipe|GOAWAY",
    "the connection does not answer": "keepalive",
    "cannot connect": "failed to connect to all addresses",
}


def plain_text(details: str) -> str:
    """Return what a text of gRPC means, or its printable characters if it is unknown."""
    for meaning, pattern in _PLAIN.items():
        if re.search(pattern, details):
            return meaning
    return printable(details, MAX_CHARACTERS)


def printable(text: str, limit: int) -> str:
    """Return `text` in one line without control characters, cut to `limit` characters."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    words = " ".join(clean.split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


_CLASS, _PUBLIC = "mtp-error", "mtp-public-bin"

_MAX_TEXT = 1000
"""Maximum bytes of a message. gRPC refuses headers above 8 KB, and percent-encoding triples a byte."""


@dataclass(frozen=True)
class Status:
    """The status that ends a call: the name of a grpc.StatusCode, the message, and the trailing metadata."""

    code: str
    details: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


def to_status(error: Exception) -> Status:
    """Return the status that ends a call with `error`. Of another library's exception it names only the class."""
    if not isinstance(error, ClusterError):
        return Status("INTERNAL", f"{type(error).__name__}. See the log of that process")
    metadata: list[tuple[str, str | bytes]] = [(_CLASS, type(error).__name__)]
    if error.public != str(error):
        metadata.append((_PUBLIC, _cut(error.public)))
    return Status(error.grpc_status, _text(_cut(str(error))), tuple(metadata))


def from_status(
    code: str, details: str | None, metadata: Iterable[tuple[str, str | bytes]] | None, peer: str
) -> ClusterError:
    """Return the error of a failed call, by the name of its StatusCode. Only the message names `peer`. Never raises."""
    found = dict(metadata or ())
    text = details or f"call ended with {code}"
    if _CLASS in found:
        text = printable(text, _MAX_TEXT)
        error = _KINDS.get(_text(found[_CLASS]), ClusterError)(f"{peer}: {text}")
        error.public = _text(found[_PUBLIC]) if _PUBLIC in found else text
        return error
    connected = re.search(r"ipv4:(\S+?:\d+)", text)  # gRPC resolves a name
    text = with_advice(plain_text(text), host_of(connected[1] if connected else peer))
    kind, template = _FROM_GRPC.get(code, (ClusterError, "{peer}: {text}"))
    error = kind(template.format(peer=peer, text=text))
    error.public = template.format(peer="a worker", text=code)
    return error


def _cut(text: str) -> bytes:
    return text.encode(errors="replace")[:_MAX_TEXT]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="ignore")


_LOST = (errors.WorkerLostError, "{peer} is lost: {text}")
_REFUSED = (errors.AccessError, "{peer} refuses: {text}")
_FROM_GRPC: dict[str, tuple[type[ClusterError], str]] = {
    "UNAVAILABLE": _LOST,
    "CANCELLED": _LOST,
    "UNKNOWN": _LOST,
    "DEADLINE_EXCEEDED": (errors.DeadlineError, "{peer} timed out"),
    "UNIMPLEMENTED": (
        errors.VersionError,
        "{peer} does not answer as an mtp-worker of this release ({text}). Install the same release on both",
    ),
    "UNAUTHENTICATED": _REFUSED,
    "PERMISSION_DENIED": _REFUSED,
    "RESOURCE_EXHAUSTED": (errors.ProtocolError, "{peer}: message above the size limit: {text}"),
}

_KINDS: dict[str, type[ClusterError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ClusterError)
}
