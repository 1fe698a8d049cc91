"""Named API keys: stored as hashes, checked by scope, and changed without a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.trust.key_ring import ApiKey, KeyRing, Scope
from proto.errors import AccessError, UsageError

INFERENCE = frozenset({Scope.INFERENCE})


def found(ring: KeyRing, text: str) -> ApiKey:
    """Return the key with this text, which must exist."""
    key = ring.find(text.encode())
    assert key is not None
    return key


def test_a_key_is_found_by_its_text_alone(tmp_path: Path) -> None:
    """Another ring, as in a running server, sees a new and a revoked key at once. The file has only a hash."""
    server, command = KeyRing(tmp_path), KeyRing(tmp_path)
    assert server.stored_keys() == []
    text = command.create("laptop", INFERENCE)
    assert found(server, text).name == "laptop"
    assert server.find(text[:-1].encode()) is None
    assert server.find(b"") is None
    assert all(text.encode() not in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    with pytest.raises(UsageError, match="exists"):
        command.create("laptop", INFERENCE)
    command.revoke("laptop")
    assert server.find(text.encode()) is None
    with pytest.raises(UsageError, match="no key"):
        command.revoke("laptop")


def test_a_key_permits_its_scopes(tmp_path: Path) -> None:
    """A key for metrics does not permit inference."""
    ring = KeyRing(tmp_path)
    key = found(ring, ring.create("grafana", frozenset({Scope.METRICS})))
    ring.check_scope(key, Scope.METRICS)
    with pytest.raises(AccessError, match="inference"):
        ring.check_scope(key, Scope.INFERENCE)
