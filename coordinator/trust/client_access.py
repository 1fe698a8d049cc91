"""The tokens with which other machines become clients or members, and the keys that clients get."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.trust.authority import Authority
from coordinator.trust.keys import KeyRing, Scope
from coordinator.trust.registry import Registry
from proto.errors import AccessError
from proto.trust import joining

INVITATION_SECONDS = 3600.0
"""Seconds for which an invitation is valid: long enough to install the program on the new machine."""


@dataclass(frozen=True)
class Invitation:
    """One invitation. `command` holds the token, which admits one machine. `expires_at` is seconds since 1970."""

    command: str = field(repr=False)
    expires_at: int


class ClientAccess:
    """The tokens of clients, and the keys that they get. `url` is that of the HTTPS server."""

    def __init__(self, state: Path, authority: Authority, ring: KeyRing, url: str) -> None:
        self._state = state
        self._authority = authority
        self._ring = ring
        self._url = url

    def invite(self, seconds: float = INVITATION_SECONDS, uses: int = 1) -> Invitation:
        """Return the line for new clients."""
        token = joining.new_token(self._authority.cluster, self._authority.fingerprint, self._url)
        Registry(self._state).add_token(token, seconds, uses, for_clients=True)
        return Invitation(f"mtp-coord connect {token}", round(time.time() + seconds))

    @property
    def authorities(self) -> str:
        """The certificates in PEM with which clients check the server."""
        self._authority.reload()
        return self._authority.bundle

    def admit(self, token_id: str, proof: str, name: str) -> str:
        """Return a new API key for the holder of a token. Raises AccessError for a wrong proof."""
        session = bytes.fromhex(self._authority.cluster)
        try:
            Registry(self._state).use_token(token_id, bytes.fromhex(proof), session, name, for_clients=True)
        except (AccessError, ValueError) as error:
            text = f"The token is refused: {error}. Get another with mtp-coord token create --client."
            raise AccessError(text) from error
        shown = "".join(c for c in name if c.isprintable())[:64]
        return self._ring.create(f"{shown}-{token_id[:4]}", frozenset({Scope.INFERENCE, Scope.METRICS}))


def client_proof(token: joining.JoinToken, name: str) -> str:
    """Return the proof that `ClientAccess.admit` checks. The client sends it over TLS that it has verified."""
    return token.proof(bytes.fromhex(token.cluster), name).hex()
