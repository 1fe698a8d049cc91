"""`mtp-coord` that answers for its number of asyncio tasks. It runs as a program."""

from __future__ import annotations

from coordinator import cli
from tests.support.processes.task_count import answer_for_tasks


def main() -> None:
    """Run `mtp-coord`."""
    answer_for_tasks()
    cli.main()
