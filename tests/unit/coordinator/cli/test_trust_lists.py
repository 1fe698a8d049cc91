"""The lists of keys, tokens and nodes: columns under a header, and `none` for an empty list."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.trust.authority import Authority
from coordinator.trust.keys import KeyRing
from coordinator.trust.registry import Registry
from proto.errors import UsageError
from proto.trust.joining import JoinToken, new_token


def lines(state: Path, *arguments: str) -> list[str]:
    """Return the lines that a command prints."""
    result = CliRunner().invoke(app, [*arguments, "--state-dir", str(state)])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_lists_have_a_header_and_say_none(tmp_path: Path) -> None:
    """An empty list is not an empty output, which looks like a failure."""
    Authority.open(tmp_path, create=True)
    for command in ("key", "token", "node"):
        (header, row) = lines(tmp_path, command, "list")
        assert header.startswith(command)
        assert row == "none"
    lines(tmp_path, "key", "create", "anna")
    (header, row) = lines(tmp_path, "key", "list")
    assert header.split() == ["key", "scopes", "created"]
    assert row.startswith("anna  inference  ")
    assert lines(tmp_path, "key", "revoke", "anna") == ["revoked anna"]
    with pytest.raises(UsageError, match="name of a key is empty"):
        KeyRing(tmp_path).create(" ", frozenset())


def test_the_list_of_tokens_has_those_of_the_user(tmp_path: Path) -> None:
    """The token that a coordinator keeps for workers of its user is not listed. A revoked token is named."""
    authority = Authority.open(tmp_path, create=True)
    assert authority is not None
    token = new_token(authority.cluster, authority.fingerprint, "10.0.0.1:50504")
    registry = Registry(tmp_path)
    registry.add_token(token, 60.0, 100, is_local=True)
    assert lines(tmp_path, "token", "list")[1:] == ["none"]
    registry.use_token(token.token_id, token.proof(b"session", "request"), b"session", "request")
    created = lines(tmp_path, "token", "create", "--bare", "--address", "10.0.0.1:50504")
    (row,) = lines(tmp_path, "token", "list")[1:]
    token_id = row.split()[0]
    assert token_id == JoinToken.parse(created[0]).token_id
    assert lines(tmp_path, "token", "revoke", token_id) == [f"revoked {token_id}"]
