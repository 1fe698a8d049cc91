"""What a process holds: file descriptors, threads, tasks, memory. Sampled now and then, to see what grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.processes.task_count import ask_for_tasks

FEW = 6
"""Descriptors, threads or tasks more or less are those of the calls that happen to be under way."""


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


def grown(samples: Sequence[Vitals]) -> list[str]:
    """What there is more of in the last sample than in the second, which is from after the first tenth of a run.

    Memory is not judged: allocators keep what they once had, and how much that is shows only over many samples.
    """
    if len(samples) < 2:
        return []
    early, late = samples[1], samples[-1]
    counts = ("descriptors", "threads", "tasks")
    pairs = {what: (getattr(early, what), getattr(late, what)) for what in counts}
    return [f"{what} {a} to {b}" for what, (a, b) in pairs.items() if b - a > FEW]
