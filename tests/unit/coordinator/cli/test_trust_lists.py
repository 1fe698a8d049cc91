"""The lists of keys, tokens and nodes: columns under a header, and `none` for an empty list."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.trust.authority import Authority


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
