"""The certificate authority of a cluster, in the coordinator's state directory."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import dropwhile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from proto.errors import AccessError, UsageError
from proto.state_dir import locked, read_json, read_text, write_private
from proto.trust.certificates import (
    NodeIdentity,
    Role,
    fingerprint,
    from_pem,
    is_due,
    key_from_pem,
    key_to_pem,
    new_id,
    new_key,
    to_pem,
    utc_now,
)

CERTIFICATE_LIFE = timedelta(days=30)
"""Life of a node's certificate. A node renews it after 20 days, so a node may be off for ten days or more."""

AUTHORITY_LIFE = timedelta(days=3650)
MAX_AUTHORITIES = 8
"""Earlier authorities that are accepted at most. A chain with all of them stays below MAX_PEM_BYTES."""

CLOCK_SKEW = timedelta(minutes=10)
"""Certificates are valid from this long before they are made, for nodes with a slow clock."""


@dataclass
class Authority:
    """The key and the certificates of the authority. Methods that change it also save it.

    `certificates` are the accepted authorities, the newest first. Each of `crosses` is a certificate of one of their
    keys that the authority after it issued. So a node that knows any of them accepts all newer certificates.
    """

    directory: Path
    cluster: str
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificates: tuple[x509.Certificate, ...]
    crosses: tuple[x509.Certificate, ...] = ()

    @classmethod
    def open(cls, state: Path, *, create: bool = False) -> Authority | None:
        """Return the authority, or None; with `create`, make one if needed. Raises UsageError for damaged files."""
        directory = state / "authority"
        if not create and not directory.exists():
            return None
        with locked(directory):
            found = _load(directory)
            if found is None and create:
                key, cluster = new_key(), new_id()
                found = cls(directory, cluster, key, (_self_signed(key, cluster),))
                found._save()
            return found

    @property
    def version(self) -> int:
        """A number that changes when a command changes the authority."""
        return (self.directory / "authorities.pem").stat().st_mtime_ns

    def reload(self) -> None:
        """Read the files again, which `mtp-coord ca rotate` may have changed."""
        with locked(self.directory):
            found = _load(self.directory)
        if found is not None and found.cluster == self.cluster:
            self.key, self.certificates, self.crosses = found.key, found.certificates, found.crosses

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of the current certificate, which join tokens name."""
        return fingerprint(self.certificates[0])

    def must_renew(self, certificate: x509.Certificate) -> bool:
        """Return whether a certificate is due, or of an earlier authority."""
        return certificate.issuer != self.certificates[0].subject or is_due(certificate)

    @property
    def bundle(self) -> str:
        """The accepted authorities in PEM."""
        return to_pem(*self.certificates)

    @property
    def chain(self) -> str:
        """The accepted authorities and the crosses in PEM, with which a machine that knows any of them checks all."""
        return to_pem(*self.certificates, *self.crosses)

    def issue(
        self,
        key: ec.EllipticCurvePublicKey,
        identity: NodeIdentity,
        hosts: tuple[str, ...] = (),
        life: timedelta = CERTIFICATE_LIFE,
    ) -> str:
        """Return a certificate chain in PEM for `key`. `hosts` are additional names, for the HTTP server."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        names += [x509.DNSName(name) for name in identity.host_names]
        names += [_host_name(host) for host in hosts]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        subject = _name(f"mtp-cluster {identity.role} {identity.node}")
        leaf = (
            _builder(subject, self.certificates[0].subject, key, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(_issuer_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return to_pem(leaf, *self.crosses)

    def issue_to_coordinator(self, hosts: tuple[str, ...] = ()) -> tuple[ec.EllipticCurvePrivateKey, str]:
        """Return a new key of the coordinator, and its certificate chain in PEM."""
        key, identity = new_key(), NodeIdentity(self.cluster, Role.COORDINATOR, new_id())
        return key, self.issue(key.public_key(), identity, hosts)

    def rotate(self) -> None:
        """Make a new key. Earlier ones stay until their certificates end. Raises UsageError for too many."""
        self.drop_expired()
        if len(self.certificates) > MAX_AUTHORITIES:
            raise UsageError(
                f"{MAX_AUTHORITIES} earlier authorities are still accepted, each for {CERTIFICATE_LIFE.days} days "
                "after its rotation. Rotate again when the oldest one has expired"
            )
        with locked(self.directory):
            old_key, key = self.key, new_key()
            new = _self_signed(key, self.cluster)
            issuer, public = self.certificates[0].subject, key.public_key()
            cross = _signed(_builder(new.subject, issuer, public, CERTIFICATE_LIFE), old_key)
            self.key = key
            self.certificates = (new, *self.certificates)
            self.crosses = (cross, *self.crosses)
            self._save()

    def drop_expired(self) -> bool:
        """Stop accepting the earlier authorities whose certificates have all expired. Return whether there were any."""
        now = utc_now()
        kept = [cross for cross in self.crosses if now <= cross.not_valid_after_utc]
        if len(kept) == len(self.crosses):
            return False
        with locked(self.directory):
            self.certificates = self.certificates[: len(kept) + 1]
            self.crosses = tuple(kept)
            self._save()
        return True

    def _save(self) -> None:
        """Write the files, the key last. Until then `_load` ignores certificates of the new key."""
        write_private(self.directory / "crosses.pem", to_pem(*self.crosses))
        write_private(self.directory / "authorities.pem", self.bundle)
        write_private(self.directory / "cluster.json", json.dumps({"cluster": self.cluster}))
        write_private(self.directory / "authority.key", key_to_pem(self.key))


def _load(directory: Path) -> Authority | None:
    key, bundle = read_text(directory / "authority.key"), read_text(directory / "authorities.pem")
    cluster = read_json(directory / "cluster.json").get("cluster")
    if key is None or bundle is None or not isinstance(cluster, str):
        return None
    crosses = read_text(directory / "crosses.pem")
    try:
        private = key_from_pem(key)
        # A rotation that was interrupted, such as by a full disk, left certificates of a key that is lost.
        chain = _from_key_on(private, from_pem(crosses) if crosses else [])
        certificates = _from_key_on(private, from_pem(bundle))[: len(chain) + 1]
        if not certificates:
            raise AccessError("no certificate is of the key")
        return Authority(directory, cluster, private, certificates, chain)
    except AccessError as error:
        raise UsageError(f"{directory}: {error}. Restore the directory from a backup") from error


def _from_key_on(key: ec.EllipticCurvePrivateKey, chain: list[x509.Certificate]) -> tuple[x509.Certificate, ...]:
    """Return the certificates of `chain`, the newest first, from the first one of `key` on."""
    return tuple(dropwhile(lambda each: each.public_key() != key.public_key(), chain))


def _self_signed(key: ec.EllipticCurvePrivateKey, cluster: str) -> x509.Certificate:
    subject = _name(f"mtp-cluster {cluster} authority {new_id()}")
    return _signed(_builder(subject, subject, key.public_key(), AUTHORITY_LIFE), key)


def _signed(builder: x509.CertificateBuilder, issuer_key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return the certificate of an authority."""
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(_issuer_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = utc_now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _issuer_key(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
