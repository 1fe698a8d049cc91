"""`mtp-coord` whose streams send a keep-alive ten times a second. It runs as a program."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

from coordinator import cli
from coordinator.api.context import ApiOptions


def main() -> None:
    """Run `mtp-coord` with a keep-alive interval of 0.1 seconds."""
    talkative = partial(ApiOptions, keep_alive_seconds=0.1)
    with patch("coordinator.serve.server.ApiOptions", talkative):
        cli.main()
