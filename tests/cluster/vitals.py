"""What a process holds: file descriptors, threads, tasks, memory. Sampled now and then, to see what grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.task_count import ask_for_tasks


@dataclass(frozen=True)
class Vitals:
    """At one moment. Memory in MB."""

    descriptors: int
    threads: int
    tasks: int
    memory: float


def vitals(pid: int, folder: Path) -> Vitals:
    """Of a process that answers for its tasks in `folder`."""
    process = psutil.Process(pid)
    return Vitals(
        process.num_fds(),
        process.num_threads(),
        ask_for_tasks(folder, pid),
        round(process.memory_info().rss / 1e6, 1),
    )
