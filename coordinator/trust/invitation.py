"""A fresh join token with the command that a new machine runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from coordinator.trust.cluster_trust import ClusterTrust
from proto.errors import NotReadyError
from proto.trust.join_token import new_token

INVITATION_SECONDS = 3600.0
"""Seconds for which an invitation is valid: long enough to install the program on the new machine."""


@dataclass(frozen=True)
class Invitation:
    """One invitation. `command` holds the token, which admits one machine. `expires_at` is seconds since 1970."""

    command: str = field(repr=False)
    expires_at: int


def make_invitation(trust: ClusterTrust) -> Invitation:
    """Return a new invitation. Raises NotReadyError if this coordinator has no address where machines join."""
    address = trust.registry.address()
    if not address:
        raise NotReadyError("machines cannot join: start mtp-coord serve with --listen")
    token = new_token(trust.authority.cluster, trust.authority.fingerprint, address)
    trust.registry.add_token(token, INVITATION_SECONDS, 1)
    command = f"mtp-worker --listen 0.0.0.0:50505 --join {token}"
    return Invitation(command, round(time.time() + INVITATION_SECONDS))
