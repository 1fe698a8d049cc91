"""TLS contexts of data connections: mutual TLS 1.3 with the certificates and the checks that gRPC calls have."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

from proto.errors import AccessError
from proto.trust.identity import NodeIdentity
from proto.trust.node_trust import NodeTrust


def server_context(trust: NodeTrust) -> ssl.SSLContext:
    """Return a context that accepts the nodes of the cluster and no other peer."""
    return _context(ssl.PROTOCOL_TLS_SERVER, trust)


def client_context(trust: NodeTrust) -> ssl.SSLContext:
    """Return a context that connects to a node of the cluster with the name that `wrap_socket` is given."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, trust)


def peer_identity(connection: ssl.SSLSocket) -> NodeIdentity:
    """Return the identity in the peer's verified certificate. Raises AccessError when it has none."""
    found = connection.getpeercert() or {}
    names = found.get("subjectAltName", ())
    uris = [str(pair[1]) for pair in names if isinstance(pair, tuple) and pair[0] == "URI"]
    if len(uris) != 1:
        raise AccessError("the peer has no certificate of a cluster")
    return NodeIdentity.parse(uris[0])


def _context(side: int, trust: NodeTrust) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # An authority may be certified by an older one, which need not be known here.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    context.load_verify_locations(cadata=trust.authorities)
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = (
            0  # no session is resumed, and the client reads nothing after the handshake
        )
    with tempfile.TemporaryDirectory() as directory:  # the library reads keys from files only
        file = Path(directory) / "node.pem"
        file.touch(0o600)
        file.write_text(trust.key_pem + trust.certificate)
        context.load_cert_chain(file)
    return context
