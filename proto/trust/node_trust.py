"""The trust of one running node: its key and certificate, the accepted authorities, removed nodes, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from proto.errors import AccessError, UsageError
from proto.state_dir import SERVER_FILE, read_json, read_text, write_private
from proto.trust import certificates

MAX_REMOVED = 10_000
"""Bounds the removed nodes that a node keeps: many times the machines that a cluster loses."""


@dataclass
class NodeTrust:
    """The credentials of a node. Connections made after `install` use the installed ones.

    `certificate` is a chain in PEM: the node's certificate, then certificates that lead to an older authority.
    `authorities` is PEM too. `directory` keeps the credentials between runs; None keeps them in memory only.
    """

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: str
    authorities: str
    removed: frozenset[str] = frozenset()
    directory: Path | None = None
    on_removed: Callable[[frozenset[str]], None] = field(default=lambda removed: None, repr=False)
    """Called with the removed nodes whenever they change."""
    _saved: tuple[str, frozenset[str], str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.identity = _checked_identity(self.key, self.certificate, self.authorities)

    @classmethod
    def load(cls, directory: Path) -> NodeTrust | None:
        """Return the credentials in `directory`, or None without any. Raises UsageError for damaged or expired ones."""
        key, certificate = read_text(directory / "node.key"), read_text(directory / "node.pem")
        authorities = read_text(directory / "authorities.pem")
        if key is None or certificate is None or authorities is None:
            return None
        removed = frozenset(read_json(directory / "removed.json").get("nodes", ()))
        try:
            return cls(certificates.key_from_pem(key), certificate, authorities, removed, directory)
        except AccessError as error:
            raise UsageError(
                f"{directory}: the credentials of this machine are unusable: {error}. "
                "Join again with a new token: mtp-worker --join"
            ) from error

    def write_files(self) -> None:
        """Write the credentials to `directory`, if the node has one."""
        if self.directory is None:
            return
        write_private(self.directory / "node.key", certificates.key_to_pem(self.key))
        write_private(self.directory / "node.pem", self.certificate)
        write_private(self.directory / "authorities.pem", self.authorities)
        write_private(self.directory / "removed.json", json.dumps({"nodes": sorted(self.removed)}))

    @property
    def key_pem(self) -> str:
        """The private key in PEM, for TLS libraries."""
        return certificates.key_to_pem(self.key)

    def install(self, authorities: str, removed: frozenset[str], certificate: str = "") -> None:
        """Replace the authorities and removed nodes and, if given, the certificate; save them.

        Raises AccessError for values that do not fit together, which change nothing. Raises UsageError if they cannot
        be saved, such as on a full disk. They are in force then, and the next call saves them.
        """
        if len(removed) > MAX_REMOVED or not all(map(certificates.is_id, removed)):
            raise AccessError("the list of removed nodes is malformed")
        chain = certificate or self.certificate
        identity = _checked_identity(self.key, chain, authorities)
        if identity != self.identity:
            raise AccessError("the new certificate is of another node")
        before = self.removed
        self.authorities, self.removed, self.certificate = installed = authorities, removed, chain
        if removed != before:
            self.on_removed(removed)
        if installed != self._saved:
            self.write_files()
            self._saved = installed

    def save_server(self, url: str, api_key: str) -> None:
        """Keep the coordinator's URL for clients, and a key, for the commands of this user. Raises UsageError."""
        found = {"url": url, "key": api_key}
        if self.directory is not None and read_json(self.directory / SERVER_FILE) != found:
            write_private(self.directory / SERVER_FILE, json.dumps(found))

    def due_request(self) -> str:
        """Return a request for a certificate if it is due or the newest authority did not issue it, else nothing."""
        own, newest = (certificates.from_pem(text)[0] for text in (self.certificate, self.authorities))
        if own.issuer == newest.subject and not certificates.is_due(own):
            return ""
        return certificates.signing_request(self.key)

    def check_peer(self, peer: certificates.NodeIdentity) -> None:
        """Raise AccessError for a node of another cluster and for a removed node."""
        if peer.cluster != self.identity.cluster:
            raise AccessError("the peer belongs to another cluster")
        if peer.node in self.removed:
            raise AccessError("the peer was removed from the cluster")


def _checked_identity(key: ec.EllipticCurvePrivateKey, certificate: str, authorities: str) -> certificates.NodeIdentity:
    """Return the identity in the chain `certificate`. Raises AccessError unless the three belong together."""
    chain, trusted = certificates.from_pem(certificate), certificates.from_pem(authorities)
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if chain[0].public_key().public_bytes(*form) != key.public_key().public_bytes(*form):
        raise AccessError("the certificate is of another key")
    now = certificates.utc_now()
    certificates.check_issued_by(chain[0], [*trusted, *chain[1:]], now)
    if not any(certificates.is_valid_at(authority, now) for authority in trusted):
        raise AccessError("the cluster's authority has expired")
    return certificates.identity_of(chain[0])
