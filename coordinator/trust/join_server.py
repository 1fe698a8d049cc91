"""The server where machines join: TLS 1.3, one join token per connection, a certificate in return."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from coordinator.trust.authority import CERTIFICATE_LIFE, Authority
from coordinator.trust.registry import Registry
from proto.errors import ClusterError, ProtocolError, UsageError
from proto.trust.certificates import from_pem, key_to_pem, new_key, requested_key
from proto.trust.identity import NodeIdentity, Role, new_id
from proto.trust.join_session import (
    JOIN_SECONDS,
    MAX_LINE_BYTES,
    read_message,
    session_binding,
    text_of,
    write_message,
)

log = logging.getLogger(__name__)

_DER = serialization.Encoding.DER

MAX_OPEN, MAX_OPEN_OF_PEER = 64, 8
"""Bound the joins in progress, in all and from one address."""

MAX_FAILURES, MAX_FAILURES_OF_PEER = 1000, 20
FAILURE_SECONDS = 60.0
"""Bound the refused tokens within these seconds, in all and from one address. Above a bound joins are refused."""

REFUSED = (
    "the coordinator refused the token. It may be used, expired, revoked or of another cluster. "
    "Get a new one with mtp-coord token create"
)
"""The answer to every refused token. The log of the coordinator has the reason."""

LIMITED = "the coordinator has received too many joins. Try again in a minute"
"""The answer above a limit, before the joining machine has sent anything."""


class JoinServer:
    """The joins at one address. Errors of one connection do not reach the others."""

    def __init__(self, authority: Authority, registry: Registry) -> None:
        self._authority = authority
        self._registry = registry
        self._open: Counter[str] = Counter()
        """Joins in progress by the peer's address."""
        self._failures: deque[tuple[float, str]] = deque()
        """Monotonic seconds and peer of each refused token, the oldest first."""

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve joins while the block runs, and yield the port. Raises UsageError if it is not available."""
        try:
            server = await asyncio.start_server(
                self._join,
                host,
                port,
                ssl=self._context(),
                ssl_handshake_timeout=JOIN_SECONDS,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise UsageError(
                f"--listen {host}:{port}: {error.strerror or error}. Choose another address or port"
            ) from error
        async with server:
            yield server.sockets[0].getsockname()[1]

    def _context(self) -> ssl.SSLContext:
        """Return a TLS context with a certificate of the coordinator that lives as long as this process."""
        key = new_key()
        identity = NodeIdentity(self._authority.cluster, Role.COORDINATOR, new_id())
        chain = self._authority.issue(key.public_key(), identity)
        self._certificate = from_pem(chain)[0].public_bytes(_DER)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # every join is a full handshake
        with tempfile.TemporaryDirectory() as directory:  # the library reads keys from files only
            file = Path(directory) / "join.pem"
            file.touch(0o600)
            file.write_text(key_to_pem(key) + chain)
            context.load_cert_chain(file)
        return context

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        peer = str(writer.get_extra_info("peername", ("?",))[0])
        self._open[peer] += 1
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await self._answer(reader, writer, peer)
        except (OSError, TimeoutError, ProtocolError) as error:
            log.info("join ended early", extra={"peer": peer, "error": type(error).__name__})
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # drops the peers without joins
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(JOIN_SECONDS):
                    await writer.wait_closed()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        greeting = {"authorities": self._authority.bundle}
        if self._is_limited(peer):
            log.warning("join refused", extra={"peer": peer, "reason": "too many joins"})
            await write_message(writer, greeting | {"refused": LIMITED})
            return
        await write_message(writer, greeting)
        # A program that connects by mistake, such as a gRPC client, ends here. It has tried no token.
        request = await read_message(reader)
        tls = writer.get_extra_info("ssl_object")
        try:
            reply = self._admit(request, session_binding(tls, self._certificate), peer)
        except ClusterError as error:
            self._failures.append((time.monotonic(), peer))
            log.warning("join refused", extra={"peer": peer, "reason": str(error)})
            reply = {"refused": REFUSED}
        await write_message(writer, reply)

    def _is_limited(self, peer: str) -> bool:
        """Return whether too many joins are in progress or were refused, in all or from `peer`."""
        now = time.monotonic()
        while self._failures and self._failures[0][0] < now - FAILURE_SECONDS:
            self._failures.popleft()
        failed = sum(address == peer for _, address in self._failures)
        return (
            self._open.total() > MAX_OPEN
            or self._open[peer] > MAX_OPEN_OF_PEER
            or len(self._failures) >= MAX_FAILURES
            or failed >= MAX_FAILURES_OF_PEER
        )

    def _admit(self, request: dict[str, object], session: bytes, peer: str) -> dict[str, str]:
        """Return the certificate for a valid request. Raises AccessError or ProtocolError otherwise."""
        token_id, csr = text_of(request, "token_id"), text_of(request, "request")
        name = "".join(c for c in text_of(request, "name") if c.isprintable())[:64]
        try:
            proof = bytes.fromhex(text_of(request, "proof"))
        except ValueError as error:
            raise ProtocolError("the proof is malformed") from error
        key = requested_key(csr)
        self._registry.use_token(token_id, proof, session, csr)
        identity = NodeIdentity(self._authority.cluster, Role.WORKER, secrets.token_hex(8))
        chain = self._authority.issue(key, identity)
        expires = time.time() + CERTIFICATE_LIFE.total_seconds()
        self._registry.record_node(identity.node, name, expires)
        log.info("machine joined", extra={"peer": peer, "worker": name, "node": identity.node})
        return {"certificate": chain, "authorities": self._authority.bundle}
