"""`mtp-coord` that describes its memory and threads in a file when it gets SIGUSR2. It runs as a program."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import psutil

from coordinator import cli
from tests.support.processes.task_count import TASKS, answer_for_tasks


def main() -> None:
    """Run `mtp-coord`."""
    answer_for_tasks()
    signal.signal(signal.SIGUSR2, lambda *_: describe())
    cli.main()


def describe() -> None:
    """Write the counts of objects, the names of threads, and the memory before and after malloc_trim."""
    process = psutil.Process()
    before = process.memory_info().rss
    gc.unfreeze()
    gc.collect()
    collected = process.memory_info().rss
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = process.memory_info().rss
    types = Counter(type(each).__qualname__ for each in gc.get_objects())
    named = Counter(thread.name for thread in threading.enumerate())
    found = {
        "resident": before,
        "collected": collected,
        "trimmed": trimmed,
        "objects": types.most_common(60),
        "python_threads": dict(named),
        "threads": _thread_names(),
        "traced": tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0,
        "allocations": _allocations(),
    }
    file = Path(os.environ[TASKS], f"{os.getpid()}.memory")
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(file)


def _thread_names() -> dict[str, int]:
    """Return the number of the system's threads by name."""
    folder = Path("/proc/self/task")
    return dict(Counter(f.joinpath("comm").read_text().strip() for f in folder.iterdir()))


def _allocations() -> list[str]:
    if not tracemalloc.is_tracing():
        return []
    found = tracemalloc.take_snapshot().statistics("lineno")
    return [str(each) for each in found[:40]]
