"""Advice for connections that macOS blocks."""

from __future__ import annotations

import pytest

from proto.errors import WorkerLostError
from proto.rpc.status_codes import from_status

BLOCKED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.2:50505: "
    "Failed to connect to remote host: connect: No route to host (65)"
)
REFUSED = BLOCKED.replace("No route to host (65)", "Connection refused (61)")


@pytest.mark.parametrize(
    ("platform", "details", "advised"),
    [("darwin", BLOCKED, True), ("darwin", REFUSED, False), ("linux", BLOCKED, False)],
)
def test_a_blocked_connection_on_macos_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, platform: str, details: str, advised: bool
) -> None:
    """Errno 65 on macOS adds the advice to run a LaunchDaemon, to the operator's message only."""
    monkeypatch.setattr("sys.platform", platform)
    error = from_status("UNAVAILABLE", details, None, "10.0.0.2:50505")
    assert isinstance(error, WorkerLostError)
    assert "failed to connect to all addresses" not in str(error), "raw text of gRPC"
    assert ("LaunchDaemon" in str(error)) is advised
    assert "LaunchDaemon" not in error.public
