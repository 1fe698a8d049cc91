"""The joining machine's side of a join: check the server, prove the token, and keep the certificate."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

from cryptography import x509

from proto.address import parse_address
from proto.errors import AccessError, DeadlineError, ProtocolError, UsageError, WorkerLostError
from proto.trust.certificates import (
    check_issued_by,
    fingerprint,
    from_pem,
    identity_of,
    new_key,
    signing_request,
    utc_now,
)
from proto.trust.identity import Role
from proto.trust.join_session import (
    JOIN_SECONDS,
    MAX_LINE_BYTES,
    read_message,
    session_binding,
    text_of,
    write_message,
)
from proto.trust.join_token import JoinToken
from proto.trust.node_trust import NodeTrust


async def join(token: JoinToken, name: str, directory: Path) -> NodeTrust:
    """Join the cluster of `token` and return this machine's credentials, saved in `directory`.

    Raises AccessError when the server is not the coordinator that the token names or refuses the token, and
    WorkerLostError or DeadlineError when it is unreachable. Before the server is verified, nothing is sent to it.
    """
    host, port = parse_address("--join", token.address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # _check_server verifies the certificate against the token
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, limit=MAX_LINE_BYTES
            )
            try:
                return await _exchange(reader, writer, token, name, directory)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        raise DeadlineError(f"the join at {token.address} timed out") from None
    except OSError as error:
        raise WorkerLostError(
            f"no coordinator answers at {token.address}: {error.strerror or error}. Check that mtp-coord serve "
            "--listen runs there and that the firewall allows the port"
        ) from error


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: JoinToken,
    name: str,
    directory: Path,
) -> NodeTrust:
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = tls.getpeercert(binary_form=True) or b""
    greeting = await read_message(reader)
    _check_server(certificate, text_of(greeting, "authorities"), token)
    if "refused" in greeting:
        raise AccessError(f"--join: {text_of(greeting, 'refused')}")
    key = new_key()
    request = signing_request(key)
    proof = token.proof(session_binding(tls, certificate), request)
    fields = {"token_id": token.token_id, "proof": proof.hex(), "request": request, "name": name}
    await write_message(writer, fields)
    reply = await read_message(reader)
    if "refused" in reply:
        raise AccessError(f"--join: {text_of(reply, 'refused')}")
    trust = NodeTrust(
        key, text_of(reply, "certificate"), text_of(reply, "authorities"), directory=directory
    )
    if trust.identity.cluster != token.cluster or trust.identity.role is not Role.WORKER:
        raise AccessError("--join: the coordinator issued a certificate of another cluster or role")
    try:
        trust.save()
    except UsageError as error:
        raise UsageError(f"{error}. The token is used; create a new one") from error
    return trust


def _check_server(certificate: bytes, authorities: str, token: JoinToken) -> None:
    """Raise AccessError unless `certificate` is a coordinator's, issued by the authority that the token names."""
    untrusted = AccessError(
        f"--join: the server at {token.address} is not the coordinator of the token. Nothing was sent to it"
    )
    try:
        found = [a for a in from_pem(authorities) if fingerprint(a) == token.authority]
        leaf = x509.load_der_x509_certificate(certificate)
        check_issued_by(leaf, found, utc_now())
        identity = identity_of(leaf)
    except (AccessError, ProtocolError, ValueError) as error:
        raise untrusted from error
    if identity.cluster != token.cluster or identity.role is not Role.COORDINATOR:
        raise untrusted
