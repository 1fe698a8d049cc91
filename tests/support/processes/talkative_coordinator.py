"""`mtp-coord` whose streams show a sign of life ten times a second: run as a program of its own."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

from coordinator import cli
from coordinator.api.context import ApiOptions


def main() -> None:
    talkative = partial(ApiOptions, keep_alive_seconds=0.1)
    with patch("coordinator.server.serve.ApiOptions", talkative):
        cli.main()
