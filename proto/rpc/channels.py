"""gRPC channels and server ports, secured by mutual TLS 1.3 for nodes that belong to a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from proto.errors import AccessError
from proto.rpc.data_plane import CHANNEL_OPTIONS
from proto.trust.identity import NodeIdentity, Role, host_name
from proto.trust.node_trust import NodeTrust

_NAMES = "x509_subject_alternative_name"


def open_channel(
    address: str,
    trust: NodeTrust | None,
    role: Role = Role.WORKER,
    node: str = "",
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """Return a channel to the node at `address`, without connecting it yet.

    With `trust` the channel uses mutual TLS, and connects only to a node of the same cluster with `role` and, if
    `node` is given, with that node id. Without `trust` the channel is not encrypted.
    """
    options = (*CHANNEL_OPTIONS, *options)
    if trust is None:
        return grpc.aio.insecure_channel(address, options=options)
    expected = host_name(trust.identity.cluster, role, node)
    credentials = grpc.ssl_channel_credentials(
        trust.authorities.encode(), trust.key_pem.encode(), trust.certificate.encode()
    )
    names = (("grpc.ssl_target_name_override", expected), ("grpc.default_authority", expected))
    return grpc.aio.secure_channel(address, credentials, options=(*options, *names))


def add_port(server: grpc.aio.Server, address: str, trust: NodeTrust | None) -> int:
    """Bind `server` to `address` and return the port. With `trust` it accepts only nodes of the cluster.

    Raises RuntimeError when the address is unavailable.
    """
    if trust is None:
        return server.add_insecure_port(address)

    def configuration() -> grpc.ServerCertificateConfiguration:
        """Return the current certificate, which may have been renewed."""
        pairs = [(trust.key_pem.encode(), trust.certificate.encode())]
        return grpc.ssl_server_certificate_configuration(pairs, trust.authorities.encode())

    credentials = grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=True
    )
    return server.add_secure_port(address, credentials)


def peer_of(context: Any) -> NodeIdentity:
    """Return the identity in the certificate of a call's peer. Raises AccessError when it has none.

    `context` is the grpc.aio.ServicerContext of the call.
    """
    names = context.auth_context().get(_NAMES, ())
    uris = [name.decode(errors="replace") for name in names if name.startswith(b"mtp://")]
    if len(uris) != 1:
        raise AccessError("the peer has no certificate of a cluster")
    return NodeIdentity.parse(uris[0])
