"""`mtp-coord` that holds nobody back for being lost often: where all are hurt all the time, none would be left."""

from __future__ import annotations

from unittest.mock import patch

from coordinator import cli
from coordinator.cluster.member import FIRST_HOLD
from tests.support.processes.task_count import answer_for_tasks


def main() -> None:
    answer_for_tasks()
    with patch("coordinator.cluster.member.LONGEST_HOLD", FIRST_HOLD / 2):
        cli.main()
