"""Joining a cluster: the token, the session that it secures, and the machine's side of the exchange."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import secrets
import ssl
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from proto.announcement import JOIN_PREFIX, parse_address
from proto.errors import AccessError, DeadlineError, ProtocolError, UsageError, WorkerLostError
from proto.local_network import with_advice
from proto.trust import certificates
from proto.trust.node_trust import NodeTrust

SECRET_BYTES = 16
"""Bytes of the secret: enough that nothing can guess it."""

_CHECK_BYTES = 4
_FIXED = struct.Struct(f"{certificates.ID_BYTES}s32s{certificates.ID_BYTES}s{SECRET_BYTES}s")
"""Cluster, SHA-256 of its authority, token id and secret."""

_CONTEXT = b"mtp-cluster join 1\0"


@dataclass(frozen=True)
class JoinToken:
    """A parsed token. `authority` is the SHA-256 of the certificate of the cluster's authority."""

    cluster: str
    authority: bytes
    token_id: str
    secret: bytes = field(repr=False)
    address: str

    def __str__(self) -> str:
        """Return the line that users copy."""
        fixed = bytes.fromhex(self.cluster) + self.authority + bytes.fromhex(self.token_id)
        content = fixed + self.secret + self.address.encode()
        text = base64.urlsafe_b64encode(content + _checksum(content)).decode().rstrip("=")
        return f"{JOIN_PREFIX}{text}"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Invert `str`. Raises UsageError that does not repeat the text, because it is a secret."""
        malformed = UsageError(
            "the token is malformed or incomplete. Copy the whole line that mtp-coord token create printed"
        )
        text = "".join(text.split()).strip("\"'`")  # a terminal breaks a long line
        text = text[max(0, text.find(JOIN_PREFIX)) :]  # the whole line was copied
        if not text.startswith(JOIN_PREFIX) or len(text) > 1000:
            raise malformed
        body = text.removeprefix(JOIN_PREFIX)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
            address = content[_FIXED.size :].decode("ascii")
        except (ValueError, binascii.Error):
            raise malformed from None
        if not address.isprintable() or not address or check != _checksum(content):
            raise malformed
        cluster, authority, token_id, secret = _FIXED.unpack_from(content)
        return cls(cluster.hex(), authority, token_id.hex(), secret, address)

    def proof(self, session: bytes, request: str) -> bytes:
        """Return the proof of the secret for one TLS session and one certificate request."""
        return _private_key(self.secret).sign(_signed(session, request))

    @property
    def verifier(self) -> str:
        """The public key that checks proofs, as hexadecimal digits. The secret cannot be derived from it."""
        key = _private_key(self.secret).public_key()
        raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return raw.hex()


def new_token(cluster: str, authority: bytes, address: str) -> JoinToken:
    """Return a token with a random id and a random secret."""
    token_id, secret = secrets.token_hex(certificates.ID_BYTES), secrets.token_bytes(SECRET_BYTES)
    return JoinToken(cluster, authority, token_id, secret, address)


def is_proof(verifier: str, proof: bytes, session: bytes, request: str) -> bool:
    """Return whether `proof` is the proof of the token with `verifier` for this session and request."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(verifier))
        key.verify(proof, _signed(session, request))
    except (ValueError, InvalidSignature):
        return False
    return True


def _private_key(secret: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(_CONTEXT + secret).digest())


def _signed(session: bytes, request: str) -> bytes:
    return _CONTEXT + hashlib.sha256(session).digest() + hashlib.sha256(request.encode()).digest()


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


MAX_LINE_BYTES = 32 * 1024
"""Bounds a message. A certificate chain and its authorities take 5 KB."""

JOIN_SECONDS = 10.0
"""Seconds. Bounds a whole join."""


def session_binding(tls: ssl.SSLObject, server_certificate: bytes) -> bytes:
    """Return a value that both ends of one TLS session share and no other session has."""
    finished = tls.get_channel_binding("tls-unique")
    if finished is None or tls.version() != "TLSv1.3":
        raise ProtocolError("the join connection does not use TLS 1.3")
    return finished + hashlib.sha256(server_certificate).digest()


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message. Raises ProtocolError for a malformed or oversized one, and at the end."""
    try:
        found = json.loads(await reader.readuntil(b"\n"))
    except (EOFError, asyncio.LimitOverrunError, ValueError, RecursionError) as error:
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
    """Send a message as one line."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def join(token: JoinToken, name: str, directory: Path) -> NodeTrust:
    """Join the cluster of `token` and return this machine's credentials, saved in `directory`.

    Raises AccessError, WorkerLostError or DeadlineError. Nothing is sent to the server before it is verified.
    """
    if token.address.startswith("https:"):
        raise UsageError("--join: the token is for a client: mtp-coord connect TOKEN. Run mtp-coord token create")
    async with _connected(token.address) as (reader, writer):
        return await _exchange(reader, writer, token, name, directory)


async def check_coordinator(trust: NodeTrust, address: str) -> None:
    """Return if a coordinator of the cluster of `trust` lets machines join at `address`. It gets no data.

    Raises AccessError for one of another cluster, and WorkerLostError or DeadlineError if none answers.
    """
    known = frozenset(map(certificates.fingerprint, certificates.from_pem(trust.authorities)))
    async with _connected(address) as (reader, writer):
        await _verified(reader, writer, trust.identity.cluster, known)


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection to the server of joins at `address`, for JOIN_SECONDS. `_check_server` verifies it."""
    host, port = parse_address("--join", address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=MAX_LINE_BYTES)
            try:
                yield reader, writer
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        raise DeadlineError(f"the join at {address} timed out") from None
    except OSError as error:
        raise WorkerLostError(
            f"no coordinator answers at {address}: {with_advice(error.strerror or str(error), host)}. Check that "
            "mtp-coord serve --listen runs there and that the firewall allows the port"
        ) from error


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: JoinToken,
    name: str,
    directory: Path,
) -> NodeTrust:
    try:
        certificate = await _verified(reader, writer, token.cluster, frozenset([token.authority]))
    except AccessError as error:
        raise AccessError(
            f"--join: the server at {token.address} is not the coordinator of the token: {error}. Nothing was sent "
            "to it"
        ) from error
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    key = certificates.new_key()
    request = certificates.signing_request(key)
    proof = token.proof(session_binding(tls, certificate), request)
    fields = {"token_id": token.token_id, "proof": proof.hex(), "request": request, "name": name}
    await write_message(writer, fields)
    reply = await read_message(reader)
    if "refused" in reply:
        raise AccessError(f"--join: {text_of(reply, 'refused')}")
    trust = NodeTrust(key, text_of(reply, "certificate"), text_of(reply, "authorities"), directory=directory)
    try:
        trust.write_files()
    except UsageError as error:
        raise UsageError(f"{error}. The token is used; create a new one") from error
    return trust


async def _verified(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cluster: str, authorities: frozenset[bytes]
) -> bytes:
    """Return the certificate of the server, in DER, after `_check_server`."""
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    _check_server(certificate, text_of(await read_message(reader), "authorities"), cluster, authorities)
    return certificate


def _check_server(certificate: bytes, greeting: str, cluster: str, authorities: frozenset[bytes]) -> None:
    """Raise AccessError unless `certificate` is that of a coordinator of `cluster`.

    It must lead to an authority with a SHA-256 in `authorities`, over those in `greeting`, which the server sent.
    """
    try:
        chain, now = certificates.from_pem(greeting), certificates.utc_now()
        trusted = [a for a in chain if certificates.fingerprint(a) in authorities]
        # After a rotation, the known authority issued the next one's certificate.
        for cross in reversed(chain):
            with contextlib.suppress(AccessError):
                certificates.check_issued_by(cross, trusted, now)
                trusted += [cross] if certificates.is_authority(cross) else []
        leaf = x509.load_der_x509_certificate(certificate)
        certificates.check_issued_by(leaf, trusted, now)
        identity = certificates.identity_of(leaf)
        if identity.cluster != cluster or identity.role is not certificates.Role.COORDINATOR:
            raise AccessError("the certificate is of another cluster or role")
    except (ProtocolError, ValueError) as error:
        raise AccessError(str(error)) from error
