"""The admission of clients on other machines: a token, which is valid once, for an API key."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from coordinator.trust.authority import Authority
from coordinator.trust.cluster_trust import INVITATION_SECONDS, Invitation
from coordinator.trust.keys import KeyRing, Scope
from coordinator.trust.registry import Registry
from proto.errors import UsageError
from proto.trust.joining import JoinToken, new_token

MAX_KEYS_OF_NAME = 100
"""Keys of clients with one name. Bounds the search for a free name."""


class ClientAccess:
    """The tokens of clients, and the keys that they get. `url` is that of the HTTPS server."""

    def __init__(self, state: Path, authority: Authority, ring: KeyRing, url: str) -> None:
        self._state = state
        self._authority = authority
        self._ring = ring
        self._url = url

    def invite(self, seconds: float = INVITATION_SECONDS, uses: int = 1) -> Invitation:
        """Return the line for new clients."""
        token = new_token(self._authority.cluster, self._authority.fingerprint, self._url)
        Registry(self._state).add_token(token, seconds, uses, for_clients=True)
        return Invitation(f"mtp-coord connect {token}", round(time.time() + seconds))

    @property
    def authorities(self) -> str:
        """The certificates in PEM with which clients check the server."""
        self._authority.reload()
        return self._authority.bundle

    def admit(self, token_id: str, proof: bytes, name: str) -> str:
        """Return a new API key for the holder of a token. Raises AccessError for a wrong proof, and UsageError."""
        session = bytes.fromhex(self._authority.cluster)
        Registry(self._state).use_token(token_id, proof, session, name, for_clients=True)
        shown = "".join(c for c in name if c.isprintable())[:64] or "client"
        scopes = frozenset({Scope.INFERENCE, Scope.METRICS})
        for number in range(1, MAX_KEYS_OF_NAME):
            with contextlib.suppress(UsageError):  # the name is taken
                return self._ring.create(shown if number == 1 else f"{shown}-{number}", scopes)
        raise UsageError(f"no key for {shown} was made. See mtp-coord key list, and revoke old ones")


def client_proof(token: JoinToken, name: str) -> bytes:
    """Return the proof that `ClientAccess.admit` checks. The client sends it over TLS that it has verified."""
    return token.proof(bytes.fromhex(token.cluster), name)
