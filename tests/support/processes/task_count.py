"""The number of asyncio tasks of another process, which writes it to a file when it gets SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

TASKS = "MTP_TEST_TASKS"
"""Environment variable with the folder for these files. Each process writes one, named by its process id."""

ANSWER_SECONDS = 60.0


def answer_for_tasks() -> None:
    """Answer SIGUSR1 in this process. Call it on the main thread."""

    def write(*_: object) -> None:
        """Write the current number of tasks."""
        file = Path(os.environ[TASKS], str(os.getpid()))
        new = file.with_suffix(".new")
        new.write_text(str(len(asyncio.all_tasks())))
        new.replace(file)

    if TASKS in os.environ:
        signal.signal(signal.SIGUSR1, write)


def ask_for_tasks(folder: Path, pid: int) -> int:
    """Return the number of tasks of process `pid`. Raises TimeoutError if it does not answer."""
    file = folder / str(pid)
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not say how many tasks it has")
        time.sleep(0.02)
    return int(file.read_text())
