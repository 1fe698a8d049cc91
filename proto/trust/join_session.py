"""The messages of a join, one JSON object a line over TLS 1.3, and the value that binds them to the TLS session."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from typing import Any

from proto.errors import ProtocolError

MAX_LINE_BYTES = 32 * 1024
"""Bounds a message. A certificate chain and its authorities take 5 KB."""

JOIN_SECONDS = 10.0
"""Seconds. Bounds a whole join."""


def session_binding(tls: ssl.SSLObject, server_certificate: bytes) -> bytes:
    """Return a value that both ends of one TLS session share and no other session has.

    It is the handshake's client Finished message, which depends on every handshake byte, and the hash of the server's
    certificate (DER).
    """
    finished = tls.get_channel_binding("tls-unique")
    if finished is None or tls.version() != "TLSv1.3":
        raise ProtocolError("the join connection does not use TLS 1.3")
    return finished + hashlib.sha256(server_certificate).digest()


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message. Raises ProtocolError for a malformed or oversized one, and at the end."""
    try:
        line = await reader.readuntil(b"\n")
        found = json.loads(line)
    except (
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        ValueError,
        RecursionError,
    ) as error:
        raise ProtocolError("the join connection ended or sent a malformed message") from error
    if not isinstance(found, dict):
        raise ProtocolError("the join connection sent a malformed message")
    return found


def text_of(message: dict[str, Any], name: str) -> str:
    """Return a text field of a message. Raises ProtocolError when it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"the join message has no field {name}")
    return value


async def write_message(writer: asyncio.StreamWriter, message: dict[str, str]) -> None:
    """Send a message."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
