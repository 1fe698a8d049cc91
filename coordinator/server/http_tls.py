"""The TLS of the HTTP server: whether it is needed, and its certificate."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from coordinator.server.options import ServeOptions
from coordinator.trust.authority import Authority
from proto.address import is_loopback
from proto.errors import UsageError
from proto.rpc.bind import own_addresses
from proto.trust.certificates import fingerprint, from_pem, key_to_pem, new_key
from proto.trust.identity import NodeIdentity, Role, new_id
from proto.trust.state_dir import write_private

UNSPECIFIED = (str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0)))
"""The addresses that stand for every interface."""


@dataclass(frozen=True)
class TlsFiles:
    """The files of a server certificate. `fingerprint` is the SHA-256 of a certificate of the cluster."""

    certificate: Path
    key: Path
    fingerprint: str = ""


def http_tls(options: ServeOptions) -> TlsFiles | None:
    """Return the certificate of the HTTP server, or None for plain HTTP.

    Plain HTTP is for loopback and for --insecure. Otherwise the user's certificate, or one of the cluster, is used.
    Raises UsageError for unreadable files.
    """
    if options.tls_cert is not None and options.tls_key is not None:
        for file in (options.tls_cert, options.tls_key):
            if not file.is_file():
                raise UsageError(
                    f"{file}: no such file. Give --tls-cert and --tls-key as PEM files"
                )
        return TlsFiles(options.tls_cert, options.tls_key)
    if options.insecure or is_loopback(options.host):
        return None
    authority = Authority.open(options.state, create=True)
    assert authority is not None
    return _cluster_certificate(authority, options)


def _cluster_certificate(authority: Authority, options: ServeOptions) -> TlsFiles:
    key = new_key()
    identity = NodeIdentity(authority.cluster, Role.COORDINATOR, new_id())
    name = socket.gethostname()
    hosts = {*own_addresses(), name, f"{name.partition('.')[0]}.local", "localhost"}
    if options.host not in UNSPECIFIED:
        hosts.add(options.host)
    chain = authority.issue(key.public_key(), identity, tuple(sorted(hosts)))
    files = options.state / "http"
    write_private(files / "server.pem", chain)
    write_private(files / "server.key", key_to_pem(key))
    digest = fingerprint(from_pem(chain)[0]).hex()
    return TlsFiles(files / "server.pem", files / "server.key", digest)
