"""The join token: one line that lets a machine join a cluster, and the proof of its secret.

The secret never travels. Both sides derive a signature key from it: the coordinator keeps only the public half,
and the worker signs the TLS session and its certificate request with the private half.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from proto.errors import UsageError
from proto.trust.identity import ID_BYTES

PREFIX = "mtp1."
SECRET_BYTES = 16
"""Bytes of the secret: enough that nothing can guess it."""

_DIGEST_BYTES = 32
_CHECK_BYTES = 4
_FIXED_BYTES = ID_BYTES + _DIGEST_BYTES + ID_BYTES + SECRET_BYTES
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
        return f"{PREFIX}{text}"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Invert `str`. Raises UsageError that does not repeat the text, because it is a secret."""
        malformed = UsageError(
            "--join: the token is malformed or incomplete. Copy the whole line that "
            "mtp-coord token create printed"
        )
        text = text.strip()
        if not text.startswith(PREFIX) or len(text) > 1000:
            raise malformed
        body = text.removeprefix(PREFIX)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
            address = content[_FIXED_BYTES:].decode("ascii")
        except (ValueError, binascii.Error):
            raise malformed from None
        if not address.isprintable() or not address or check != _checksum(content):
            raise malformed
        cluster, rest = content[:ID_BYTES], content[ID_BYTES:]
        authority, rest = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
        token_id, secret = rest[:ID_BYTES], rest[ID_BYTES : ID_BYTES + SECRET_BYTES]
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
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
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
