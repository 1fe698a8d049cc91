"""The registry: nodes, tokens and named API keys. Every use of a token that must fail does fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.api.context import ApiOptions
from coordinator.api.request_body import keys_are_set
from coordinator.trust.keys import OWNER_KEY, ApiKey, KeyRing, Scope, is_own_socket
from coordinator.trust.registry import Registry
from proto.errors import AccessError, UsageError
from proto.trust.joining import JoinToken, new_token

CLUSTER, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Return an empty registry."""
    return Registry(tmp_path)


def add_token(registry: Registry, seconds: float = 60.0, uses: int = 1) -> JoinToken:
    """Return a new token that `registry` knows."""
    token = new_token(CLUSTER, bytes(32), "10.0.0.1:50504")
    registry.add_token(token, seconds, uses)
    return token


def use_token(registry: Registry, token: JoinToken, session: bytes = b"session") -> None:
    """Use a token as the join server does."""
    registry.use_token(token.token_id, token.proof(session, "request"), session, "request")


def test_the_socket_of_another_process_of_this_user_is_known() -> None:
    """That of this process and of no process is not, and neither is one on the network."""
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", listen]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert is_own_socket("127.0.0.1", port)
        assert not is_own_socket("10.0.0.1", port)
        other.communicate(b"\n", timeout=30)
    assert not is_own_socket("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert not is_own_socket("127.0.0.1", mine.getsockname()[1])


def test_a_token_joins_as_often_as_it_says(registry: Registry) -> None:
    """Each use counts, and a used token is refused."""
    token = add_token(registry, uses=2)
    use_token(registry, token)
    use_token(registry, token)
    with pytest.raises(AccessError, match="is used"):
        use_token(registry, token)


def test_tokens_that_are_refused(registry: Registry) -> None:
    """Expired, revoked and unknown tokens are refused, and so is a proof of another session, request or secret."""
    with pytest.raises(AccessError, match="expired"):
        use_token(registry, add_token(registry, seconds=-1.0))
    revoked = add_token(registry)
    registry.revoke_token(revoked.token_id)
    with pytest.raises(AccessError, match="revoked"):
        use_token(registry, revoked)
    with pytest.raises(AccessError, match="revoked"):
        use_token(registry, new_token(CLUSTER, bytes(32), "10.0.0.1:1"))
    token = add_token(registry)
    replayed = token.proof(b"another session", "request")
    with pytest.raises(AccessError, match="secret is wrong"):
        registry.use_token(token.token_id, replayed, b"session", "request")
    other_request = token.proof(b"session", "another request")
    with pytest.raises(AccessError, match="secret is wrong"):
        registry.use_token(token.token_id, other_request, b"session", "request")
    forged = JoinToken(CLUSTER, bytes(32), token.token_id, bytes(16), token.address)
    with pytest.raises(AccessError, match="secret is wrong"):
        use_token(registry, forged)
    use_token(registry, token)


def test_the_secret_is_not_stored(registry: Registry, tmp_path: Path) -> None:
    """No file holds the token's secret or the token."""
    token = add_token(registry)
    content = b"".join(f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    assert token.secret not in content
    assert token.secret.hex().encode() not in content
    assert str(token).encode() not in content


def test_nodes_are_removed_by_name_and_stay_removed(registry: Registry) -> None:
    """A removed node gets no new certificate under its node id."""
    registry.record_node(CLUSTER, "mac-2", 1.0)
    registry.record_node(OTHER, "mac-3", 1.0)
    (removed,) = registry.remove_nodes("mac-2")
    assert removed.node_id == CLUSTER
    assert registry.removed() == {CLUSTER}
    with pytest.raises(AccessError, match="removed"):
        registry.record_node(CLUSTER, "mac-2", 2.0)
    with pytest.raises(UsageError, match="no node"):
        registry.remove_nodes("mac-2")


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
