"""Identities of nodes, and the certificates that prove them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from proto.errors import AccessError, UsageError

ID_BYTES = 8
"""Bytes of a cluster id and of a node id; both are written as hexadecimal digits."""

_ID = rf"[0-9a-f]{{{2 * ID_BYTES}}}"
_URI = re.compile(rf"mtp://({_ID})/(coordinator|worker)/({_ID})")


class Role(StrEnum):
    """The two kinds of node."""

    COORDINATOR = "coordinator"
    WORKER = "worker"


@dataclass(frozen=True)
class NodeIdentity:
    """One node of one cluster. Certificates carry it as a URI and as DNS names."""

    cluster: str
    role: Role
    node: str

    @property
    def uri(self) -> str:
        """The URI subject alternative name: `mtp://CLUSTER/ROLE/NODE`."""
        return f"mtp://{self.cluster}/{self.role}/{self.node}"

    @property
    def host_names(self) -> tuple[str, str]:
        """The DNS names of the certificate: one for this node, and one for every node of its role."""
        return host_name(self.cluster, self.role, self.node), host_name(self.cluster, self.role)

    @classmethod
    def parse(cls, uri: str) -> NodeIdentity:
        """Invert `uri`. Raises AccessError for any other text."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise AccessError("the peer's certificate names no node of a cluster")
        return cls(match[1], Role(match[2]), match[3])


def host_name(cluster: str, role: Role, node: str = "") -> str:
    """Return the name that a TLS client expects in the certificate of `node`, or of any node of `role` without it."""
    return ".".join(filter(None, (node, role, cluster, "mtp-cluster")))


def new_id() -> str:
    """Return a random cluster id or node id."""
    return secrets.token_hex(ID_BYTES)


def is_id(text: str) -> bool:
    """Return whether `text` is a cluster id or node id."""
    return re.fullmatch(_ID, text) is not None


MAX_PEM_BYTES = 16 * 1024
"""Bounds every PEM text from a peer. A chain of three certificates takes 2.5 KB."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> str:
    """Return `key` as unencrypted PKCS#8."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def key_from_pem(pem: str) -> ec.EllipticCurvePrivateKey:
    """Invert `key_to_pem`. Raises UsageError for any other key."""
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError) as error:
        raise UsageError("the state directory holds a damaged private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError("the state directory holds a private key of another type")
    return key


def to_pem(*certificates: x509.Certificate) -> str:
    """Return the certificates in PEM, one after another."""
    return "".join(c.public_bytes(serialization.Encoding.PEM).decode() for c in certificates)


def from_pem(pem: str) -> list[x509.Certificate]:
    """Return the certificates in `pem`. Raises AccessError when there is none or one is malformed."""
    if len(pem) > MAX_PEM_BYTES:
        raise AccessError("a certificate exceeds the size limit")
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise AccessError("a certificate is malformed") from error


def signing_request(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a PEM request for a certificate of `key`. The authority chooses the identity in it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mtp-cluster node")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def requested_key(pem: str) -> ec.EllipticCurvePublicKey:
    """Return the P-256 key of a signing request, whose signature proves the private key. Raises AccessError."""
    try:
        request = x509.load_pem_x509_csr(pem[:MAX_PEM_BYTES].encode())
        valid, key = request.is_signature_valid, request.public_key()
    except Exception as error:  # the library raises many kinds for hostile input
        raise AccessError("the certificate request is malformed") from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise AccessError("the certificate request has no valid P-256 signature")
    return key


def identity_of(certificate: x509.Certificate) -> NodeIdentity:
    """Return the identity in a node's certificate. Raises AccessError when it has none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError) as error:  # ValueError: also for several names
        raise AccessError("the peer's certificate names no node of a cluster") from error
    return NodeIdentity.parse(uri)


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Return the SHA-256 of the certificate's DER encoding."""
    return certificate.fingerprint(hashes.SHA256())


def check_issued_by(certificate: x509.Certificate, authorities: Sequence[x509.Certificate], now: datetime) -> None:
    """Raise AccessError unless one of `authorities` issued `certificate` and both are valid at `now`."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        for each in (certificate, authority):
            if not is_valid_at(each, now):
                start, end = each.not_valid_before_utc, each.not_valid_after_utc
                raise AccessError(
                    f"the certificate has expired or is not valid yet: it is valid from {start:%Y-%m-%d %H:%M} to "
                    f"{end:%Y-%m-%d %H:%M} UTC, and the clock of this machine says {now:%Y-%m-%d %H:%M}"
                )
        return
    raise AccessError("another authority issued the certificate")


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` may issue others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def is_valid_at(certificate: x509.Certificate, now: datetime) -> bool:
    """Return whether `now` is in the validity period of `certificate`."""
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def renewal_time(certificate: x509.Certificate) -> datetime:
    """Return the time at which two thirds of the certificate's life have passed."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return start + (end - start) * 2 / 3


def is_due(certificate: x509.Certificate) -> bool:
    """Return whether a node needs a new certificate, because of its age or because a wrong clock made it."""
    return not certificate.not_valid_before_utc <= utc_now() < renewal_time(certificate)


def utc_now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)
