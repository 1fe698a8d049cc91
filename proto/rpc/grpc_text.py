"""Plain words for the texts of failed gRPC calls, which name libraries, sockets and bytes of other programs."""

from __future__ import annotations

MAX_CHARACTERS = 200
"""Characters of a text that has no plain words. A peer may have chosen it."""

_ANOTHER_PROGRAM = (
    "another program listens there. Give the address of an mtp-worker, not a port of a coordinator"
)

CLOSED = "the connection was closed"
"""The text for a connection that the peer closed. A peer that requires TLS closes a connection without it."""

_PLAIN: tuple[tuple[str, str], ...] = (
    (
        "WRONG_VERSION_NUMBER",
        "it has no TLS, so it has not joined the cluster. Start it with --join and a token of this cluster",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is of another cluster, or expired. Start it with --join and a token of this cluster",
    ),
    ("Hostname Verification", "it is another node of the cluster than expected"),
    ("ALPN", _ANOTHER_PROGRAM),
    ("http1.x", _ANOTHER_PROGRAM),
    ("HTTP/2", _ANOTHER_PROGRAM),
    ("http2 header with status", _ANOTHER_PROGRAM),
    ("Connection refused", "connection refused"),
    ("No route to host", "No route to host"),
    ("Network is unreachable", "network is unreachable"),
    ("Domain name not found", "host name not found"),
    ("DNS resolution failed", "host name not found"),
    ("hostname lookup error", "host name not found"),
    ("timed out", "connection timed out"),
    ("Socket closed", CLOSED),
    ("Connection reset", CLOSED),
    ("Broken pipe", CLOSED),
    ("GOAWAY", CLOSED),
    ("keepalive", "the connection does not answer"),
    ("failed to connect to all addresses", "cannot connect"),
)


def plain_text(details: str) -> str:
    """Return what a text of gRPC means, or its printable characters if it is unknown."""
    for part, meaning in _PLAIN:
        if part in details:
            return meaning
    return printable(details, MAX_CHARACTERS)


def printable(text: str, limit: int) -> str:
    """Return `text` in one line without control characters, cut to `limit` characters."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    words = " ".join(clean.split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"
