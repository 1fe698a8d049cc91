"""Named API keys: stored as hashes, checked by scope, and changed without a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.api.context import ApiOptions
from coordinator.api.request_body import keys_are_set
from coordinator.trust.registry import OWNER_KEY, ApiKey, KeyRing, Scope
from proto.errors import UsageError

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


def test_the_end_of_the_last_key_admits_nobody(tmp_path: Path) -> None:
    """A server that had a key, or that is open to the network, needs one after the last was revoked or deleted."""
    ring, command = KeyRing(tmp_path / "a"), KeyRing(tmp_path / "a")
    options = ApiOptions(key_ring=ring)
    assert not keys_are_set(options)
    command.create("laptop", INFERENCE)
    assert keys_are_set(options)
    command.revoke("laptop")
    assert keys_are_set(options)
    (tmp_path / "a" / "keys" / "keys.json").unlink()
    assert keys_are_set(options)
    assert keys_are_set(ApiOptions(key_ring=KeyRing(tmp_path / "b", required=True)))


def test_the_owner_of_the_directory_needs_no_named_key(tmp_path: Path) -> None:
    """A server accepts a key for every call that only its owner can read, and that is new at each start."""
    file, earlier = tmp_path / OWNER_KEY, b""
    for _ in range(2):
        ring = KeyRing(tmp_path)
        ring.admit_owner("http://127.0.0.1:8080")
        assert file.stat().st_mode & 0o777 == 0o600
        text = json.loads(file.read_text())["key"]
        for scope in Scope:
            ring.check_scope(found(ring, text), scope)
        assert not keys_are_set(ApiOptions(key_ring=ring)), "strangers need no key by this"
        assert ring.find(earlier) is None
        earlier = text.encode()
    assert found(ring, text).scopes == frozenset(Scope)
