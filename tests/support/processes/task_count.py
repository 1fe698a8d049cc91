"""How many asyncio tasks another process has: it writes their number to a file when it gets SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

TASKS = "MTP_TEST_TASKS"
"""The folder that processes write to, one file each, named by the process."""

ANSWER_SECONDS = 60.0


def answer_for_tasks() -> None:
    """Called in the process to be asked, on its main thread."""

    def write(*_: object) -> None:
        file = Path(os.environ[TASKS], str(os.getpid()))
        new = file.with_suffix(".new")
        new.write_text(str(len(asyncio.all_tasks())))
        new.replace(file)

    if TASKS in os.environ:
        signal.signal(signal.SIGUSR1, write)


def ask_for_tasks(folder: Path, pid: int) -> int:
    """The number of tasks of a process whose folder this is. Raises TimeoutError when it does not answer."""
    file = folder / str(pid)
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not say how many tasks it has")
        time.sleep(0.02)
    return int(file.read_text())
