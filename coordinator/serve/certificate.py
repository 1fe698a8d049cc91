"""The certificate of the HTTP server: the user's files, or one of the cluster that is renewed while it serves."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from uvicorn import Config

from coordinator.serve.options import ServeOptions
from coordinator.trust.authority import Authority
from proto.announcement import UNSPECIFIED
from proto.errors import UsageError
from proto.rpc.listener import own_addresses
from proto.state_dir import write_private
from proto.trust.certificates import fingerprint, from_pem, key_to_pem

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """The files of a server certificate. `fingerprint` is the SHA-256 of a certificate of the cluster."""

    certificate: Path
    key: Path
    fingerprint: str = ""


def http_tls(options: ServeOptions) -> TlsFiles | None:
    """Return the certificate of the user or the cluster, or None for plain HTTP. Raises UsageError."""
    if options.tls_cert is not None and options.tls_key is not None:
        for file in (options.tls_cert, options.tls_key):
            if not file.is_file():
                raise UsageError(f"{file}: no such file. Give --tls-cert and --tls-key in PEM")
        return TlsFiles(options.tls_cert, options.tls_key)
    if options.is_open:
        return None
    authority = Authority.open(options.state, create=True)
    assert authority is not None
    return issue_certificate(authority, options)


def issue_certificate(authority: Authority, options: ServeOptions) -> TlsFiles:
    """Write a certificate of the cluster for all addresses and names of this machine, and return its files."""
    name = socket.gethostname()
    hosts = {*own_addresses(), name, f"{name.partition('.')[0]}.local", "localhost"}
    if options.host not in UNSPECIFIED:
        hosts.add(options.host)
    key, chain = authority.issue_to_coordinator(tuple(sorted(hosts)))
    files = options.state / "http"
    write_private(files / "server.pem", chain)
    write_private(files / "server.key", key_to_pem(key))
    digest = fingerprint(from_pem(chain)[0]).hex()
    return TlsFiles(files / "server.pem", files / "server.key", digest)


RENEWAL_SECONDS = 60.0
"""Seconds between two looks at the certificate of the HTTP server."""


def renew_in_context(options: ServeOptions, tls: TlsFiles, context: ssl.SSLContext, loaded: int) -> int:
    """Use the certificate's files in `context` for new connections, if they changed since `loaded`.

    A certificate of the cluster is issued again after two thirds of its life, and after a rotation. Returns the time of
    the present files in nanoseconds. Raises UsageError, AccessError or OSError for files that cannot be used.
    """
    if tls.fingerprint:
        authority = Authority.open(options.state, create=True)
        assert authority is not None
        if authority.must_renew(from_pem(tls.certificate.read_text())[0]):
            issue_certificate(authority, options)
    changed = tls.certificate.stat().st_mtime_ns
    if changed != loaded:
        context.load_cert_chain(tls.certificate, tls.key)
        if loaded:
            log.info("HTTP certificate renewed", extra={"file": tls.certificate.name})
    return changed


async def renew_forever(options: ServeOptions, tls: TlsFiles, config: Config) -> None:
    """Renew the certificate that the HTTP server of `config` uses, until cancelled."""
    loaded = 0
    while True:
        await asyncio.sleep(RENEWAL_SECONDS)
        assert config.ssl is not None
        try:
            loaded = renew_in_context(options, tls, config.ssl, loaded)
        except Exception as error:  # such as a full disk
            log.warning("HTTP certificate not renewed", extra={"error": str(error)})
