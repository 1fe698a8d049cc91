"""The resources of a process: file descriptors, threads, asyncio tasks and memory. Samples show what grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.processes.task_count import ask_for_tasks

FEW = 6
"""Largest difference of descriptors, threads or tasks that calls in progress explain."""


@dataclass(frozen=True)
class ResourceUse:
    """One sample. Memory in MB."""

    descriptors: int
    threads: int
    tasks: int
    memory: float


def resource_use(pid: int, folder: Path) -> ResourceUse:
    """Return a sample of a process that writes its task count to `folder`."""
    process = psutil.Process(pid)
    return ResourceUse(
        process.num_fds(),
        process.num_threads(),
        ask_for_tasks(folder, pid),
        round(process.memory_info().rss / 1e6, 1),
    )


def grown(samples: Sequence[ResourceUse]) -> list[str]:
    """Return the resources of which the last sample has more than the second. The first tenth of a run is not counted.

    Memory is not compared: allocators keep freed memory, and a trend shows only over many samples.
    """
    if len(samples) < 2:
        return []
    early, late = samples[1], samples[-1]
    counts = ("descriptors", "threads", "tasks")
    pairs = {what: (getattr(early, what), getattr(late, what)) for what in counts}
    return [f"{what} {a} to {b}" for what, (a, b) in pairs.items() if b - a > FEW]
