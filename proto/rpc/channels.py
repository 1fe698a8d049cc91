"""gRPC channels, server ports and TLS contexts, secured by mutual TLS 1.3 for nodes that belong to a cluster."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from proto.errors import AccessError
from proto.frame import MAX_MESSAGE_BYTES
from proto.trust.certificates import NodeIdentity, Role, host_name
from proto.trust.node_trust import NodeTrust

FIRST_MESSAGE_SECONDS = 10.0
"""Seconds. Maximum wait for the first message of a stream, which its caller sends at once."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
"""The options of every channel and server. gRPC's default limit of 4 MB is below the frame of a prompt chunk."""


def peer_identity(connection: ssl.SSLSocket) -> NodeIdentity:
    """Return the identity in the peer's verified certificate. Raises AccessError when it has none."""
    found = connection.getpeercert() or {}
    names = found.get("subjectAltName", ())
    uris = [str(pair[1]) for pair in names if isinstance(pair, tuple) and pair[0] == "URI"]
    return _only_identity(uris)


def _only_identity(uris: list[str]) -> NodeIdentity:
    if len(uris) != 1:
        raise AccessError("the peer has no certificate of a cluster")
    return NodeIdentity.parse(uris[0])


def tls_context(trust: NodeTrust, *, server: bool) -> ssl.SSLContext:
    """Return a context that accepts only nodes of the cluster. A client checks the name that `wrap_socket` is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # An authority may be certified by an older one, which need not be known here.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    context.load_verify_locations(cadata=trust.authorities)
    if server:
        # No session is resumed, and the client reads nothing after the handshake.
        context.num_tickets = 0
    with tempfile.TemporaryDirectory() as directory:  # the library reads keys from files only
        file = Path(directory) / "node.pem"
        file.touch(0o600)
        file.write_text(trust.key_pem + trust.certificate)
        context.load_cert_chain(file)
    return context


def open_channel(
    address: str,
    trust: NodeTrust | None,
    node: str = "",
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """Return a channel to the worker at `address`, without connecting it yet.

    With `trust` the channel uses mutual TLS, and connects only to a worker of the same cluster and, if `node` is
    given, with that node id. Without `trust` the channel is not encrypted.
    """
    options = (*CHANNEL_OPTIONS, *options)
    if trust is None:
        return grpc.aio.insecure_channel(address, options=options)
    expected = host_name(trust.identity.cluster, Role.WORKER, node)
    credentials = grpc.ssl_channel_credentials(
        trust.authorities.encode(), trust.key_pem.encode(), trust.certificate.encode()
    )
    names = (("grpc.ssl_target_name_override", expected), ("grpc.default_authority", expected))
    return grpc.aio.secure_channel(address, credentials, options=(*options, *names))


def add_port(server: grpc.aio.Server, address: str, trust: NodeTrust | None) -> int:
    """Bind `server` to `address` and return the port. With `trust` only nodes connect. Raises RuntimeError."""
    if trust is None:
        return server.add_insecure_port(address)

    def configuration() -> grpc.ServerCertificateConfiguration:
        pairs = [(trust.key_pem.encode(), trust.certificate.encode())]
        return grpc.ssl_server_certificate_configuration(pairs, trust.authorities.encode())

    installed = trust.certificate, trust.authorities

    def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration after a renewal, or None, which keeps the one in use.

        gRPC calls this for every connection. Replacing it each time let half handshakes crash the process.
        """
        nonlocal installed
        if installed == (trust.certificate, trust.authorities):
            return None
        installed = trust.certificate, trust.authorities
        return configuration()

    fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed_configuration)
    credentials = grpc.dynamic_ssl_server_credentials(configuration(), fetcher, require_client_authentication=True)
    return server.add_secure_port(address, credentials)


def peer_of(context: Any) -> NodeIdentity:
    """Return the identity in the certificate of a call's peer, by its ServicerContext. Raises AccessError."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    uris = [name.decode(errors="replace") for name in names if name.startswith(b"mtp://")]
    return _only_identity(uris)
