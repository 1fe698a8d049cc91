"""The registry: nodes, tokens and named API keys. Every use of a token that must fail does fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.trust.keys import OWNER_KEY, ApiKey, KeyRing, Scope, is_own_connection
from coordinator.trust.registry import Registry
from coordinator.web.context import ApiOptions
from proto.errors import AccessError, UsageError
from proto.trust.joining import JoinToken, new_token

CLUSTER, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Return an empty registry."""
    return Registry(tmp_path)


def add_token(registry: Registry, uses: int = 1) -> JoinToken:
    """Return a new token that `registry` knows."""
    token = new_token(CLUSTER, bytes(32), "10.0.0.1:50504")
    registry.add_token(token, 60.0, uses)
    return token


def use_token(registry: Registry, token: JoinToken, session: bytes = b"session") -> None:
    """Use a token as the join server does."""
    registry.use_token(token.token_id, token.proof(session, "request"), session, "request")


OTHER_PROCESS = """
import socket, sys
host, port, server, server_port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
made.bind((host, port))
made.connect((server, server_port)) if server else made.listen()
print(made.getsockname()[1], flush=True)
input()
"""


@contextmanager
def owned_by_another_process(host: str, port: int = 0, server: tuple[Any, ...] = ("", 0)) -> Iterator[int]:
    """Hold a socket at `host`:`port` in another process, connected to `server` or listening, and yield its port."""
    command = [sys.executable, "-c", OTHER_PROCESS, host, str(port), *map(str, server[:2])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        yield int(other.stdout.readline())
        other.communicate(b"\n", timeout=30)


def listening_on(host: str) -> socket.socket:
    """Return a listener; `::` is one of both families."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")


def test_the_other_machines_are_known_by_name(registry: Registry) -> None:
    """They are the members that joined by a user's token: not this machine's own workers, also after a renewal."""
    later = time.time() + 60
    registry.record_node("1" * 16, "mac-1", later, is_local=True)
    registry.record_node("1" * 16, "", later)
    for number, name in ((2, "mac-2"), (3, "mac-2"), (4, "gone"), (5, "mac-3")):
        registry.record_node(str(number) * 16, name, later)
    registry.record_node("6" * 16, "expired", time.time() - 1)
    registry.remove_nodes("gone")
    assert registry.other_machines() == ["mac-2", "mac-3"]


def test_a_token_says_whether_it_is_local(registry: Registry) -> None:
    token = new_token(CLUSTER, bytes(32), "10.0.0.1:50504")
    for is_local in (False, True):
        registry.add_token(token, 60.0, 1, is_local=is_local)
        proof = token.proof(b"session", "request")
        assert registry.use_token(token.token_id, proof, b"session", "request") == is_local


@pytest.mark.parametrize(
    ("listener", "server", "client"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("::", "127.0.0.1", "127.0.0.1"),
        ("::", "::ffff:127.0.0.1", "::ffff:127.0.0.1"),
    ],
    ids=["IPv4", "IPv6", "both families", "a mapped client"],
)
def test_the_connection_of_another_process_of_this_user_is_known(listener: str, server: str, client: str) -> None:
    """It is known as the server sees it, in each family, and no longer after its end."""
    with listening_on(listener) as ours:
        with owned_by_another_process(client, 0, (server, ours.getsockname()[1])):
            accepted, peer = ours.accept()
            own = accepted.getsockname()
            assert is_own_connection(peer, own)
            assert not is_own_connection(own, peer)
            assert not is_own_connection(("10.0.0.1", peer[1]), own)
        with accepted:
            assert not is_own_connection(peer, own)


@pytest.mark.parametrize("vouching", ["listens", "is connected", "is connected elsewhere"])
def test_a_port_number_alone_vouches_for_nobody(vouching: str) -> None:
    """A socket of this user with the client's port, at another address or to another server, is not the client's."""
    other = {"listens": "127.0.0.2", "is connected": "127.0.0.2", "is connected elsewhere": "127.0.0.1"}[vouching]
    with listening_on("127.0.0.1") as ours, listening_on("127.0.0.1") as elsewhere, socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        targets = {
            "listens": ("", 0),
            "is connected": ours.getsockname(),
            "is connected elsewhere": elsewhere.getsockname(),
        }
        target: tuple[Any, ...] = targets[vouching]
        with owned_by_another_process(other, 0, target) as port:
            # This process stands for another user, because its own sockets do not vouch.
            if other == "127.0.0.1":
                peer: tuple[Any, ...] = (other, port)
                assert not is_own_connection(peer, ours.getsockname())
                return
            foreign.bind(("127.0.0.1", port))
            foreign.connect(ours.getsockname())
            assert not is_own_connection(foreign.getsockname(), ours.getsockname())


def test_tokens_that_are_refused(registry: Registry) -> None:
    """A token joins as often as it says. A proof of another session, request or secret is refused without a use."""
    token = add_token(registry, uses=2)
    forged = JoinToken(CLUSTER, bytes(32), token.token_id, bytes(16), token.address)
    proofs = (
        token.proof(b"another session", "request"),
        token.proof(b"session", "another request"),
        forged.proof(b"session", "request"),
    )
    for proof in proofs:
        with pytest.raises(AccessError, match="secret is wrong"):
            registry.use_token(token.token_id, proof, b"session", "request")
    for _ in range(2):
        use_token(registry, token)
    with pytest.raises(AccessError, match="is used"):
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
    assert not options.needs_key
    command.create("laptop", INFERENCE)
    assert options.needs_key
    command.revoke("laptop")
    assert options.needs_key
    (tmp_path / "a" / "keys" / "keys.json").unlink()
    assert options.needs_key
    assert ApiOptions(key_ring=KeyRing(tmp_path / "b", required=True)).needs_key


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
        assert not ApiOptions(key_ring=ring).needs_key, "strangers need no key by this"
        assert ring.find(earlier) is None
        earlier = text.encode()
    assert found(ring, text).scopes == frozenset(Scope)
