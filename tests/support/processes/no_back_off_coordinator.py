"""`mtp-coord` that uses workers again soon after they were lost.

A chaos run hits every worker again and again. With the normal waits no worker would be left.
"""

from __future__ import annotations

from unittest.mock import patch

from coordinator import cli
from coordinator.cluster.view import FIRST_BACKOFF
from tests.support.processes.moved_clock import follow_moved_clock
from tests.support.processes.task_count import answer_for_tasks


def main() -> None:
    """Run `mtp-coord` with the shortest back-off, and plans that change while answers are open."""
    answer_for_tasks()
    follow_moved_clock()
    with (
        patch("coordinator.cluster.view.LONGEST_BACKOFF", FIRST_BACKOFF / 2),
        patch("coordinator.cluster.decide.POSTPONED_SECONDS", 0.0),
    ):
        cli.main()
