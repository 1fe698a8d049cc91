"""`mtp-coord` with a bug: the loss of a worker raises an unexpected exception in the cluster's view."""

from __future__ import annotations

from unittest.mock import patch

from coordinator import cli
from coordinator.cluster.events import Event, WorkerLost, apply
from coordinator.cluster.view import View


def _broken(view: View, event: Event, now: float) -> View:
    if isinstance(event, WorkerLost):
        raise OverflowError("int too large to convert to float")
    return apply(view, event, now)


def main() -> None:
    """Run `mtp-coord` with the bug."""
    with patch("coordinator.cluster.manager.apply", _broken):
        cli.main()
