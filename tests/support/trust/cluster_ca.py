"""A cluster's authority in a temporary directory, and credentials of any node and age."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from coordinator.trust.authority import Authority
from proto.trust.certificates import NodeIdentity, Role, new_id, new_key
from proto.trust.node_trust import NodeTrust


def make_authority(folder: Path) -> Authority:
    """Return a new authority in `folder`."""
    authority = Authority.open(folder, create=True)
    assert authority is not None
    return authority


def trust_of(authority: Authority, role: Role, node: str = "", removed: frozenset[str] = frozenset()) -> NodeTrust:
    """Return valid credentials of a node."""
    key = new_key()
    identity = NodeIdentity(authority.cluster, role, node or new_id())
    chain = authority.issue(key.public_key(), identity)
    return NodeTrust(key, chain, authority.bundle, removed)


def expired_trust(authority: Authority, role: Role) -> NodeTrust:
    """Return credentials whose certificate expired a minute ago."""
    trust = trust_of(authority, role)
    trust.certificate = authority.issue(trust.key.public_key(), trust.identity, life=timedelta(minutes=-1))
    return trust
