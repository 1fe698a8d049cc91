"""Advice for macOS's Local Network privacy, which blocks connections to other machines on the same network."""

from __future__ import annotations

import sys

NO_ROUTE = "No route to host"

ADVICE = (
    "macOS may block this program from the local network, above all if launchd started it as an agent. "
    "Run it as a LaunchDaemon (deploy/README.md), or start it from Terminal and allow Terminal in "
    "System Settings > Privacy & Security > Local Network"
)


def with_advice(details: str) -> str:
    """Return the text of a failed connection, with ADVICE if macOS refused it with `No route to host` (errno 65)."""
    if sys.platform == "darwin" and NO_ROUTE in details:
        return f"{details}. {ADVICE}"
    return details
