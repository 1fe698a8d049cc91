"""The memory and the threads of another process, which describes them in a file when it gets SIGUSR2.

Run as a program, this module is an `mtp-coord` that does so.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from proto.backup import LayerState
from tests.support.processes.task_count import ANSWER_SECONDS, TASKS, answer_for_tasks


def main() -> None:
    """Run `mtp-coord`."""
    from coordinator import cli

    answer_for_tasks()
    answer_for_memory()
    cli.main()


def answer_for_memory() -> None:
    """Answer SIGUSR2 in this process. Call it on the main thread."""
    if TASKS in os.environ:
        signal.signal(signal.SIGUSR2, lambda *_: describe())


def ask_for_memory(folder: Path, pid: int) -> dict[str, Any]:
    """Return what process `pid` reports about its memory."""
    file = folder / f"{pid}.memory"
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not describe its memory")
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def growth(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the types of which there are over 100 more objects in the second report."""
    earlier = dict(before["objects"])
    more = {name: n - earlier.get(name, 0) for name, n in after["objects"]}
    return [f"{name} +{n}" for name, n in sorted(more.items(), key=lambda p: -p[1]) if n > 100]


def describe() -> None:
    """Write the counts of objects, the names of threads, and the memory before and after malloc_trim."""
    process = psutil.Process()
    before = process.memory_info().rss
    gc.unfreeze()
    gc.collect()
    collected = process.memory_info().rss
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = process.memory_info().rss
    objects = gc.get_objects()
    types = Counter(type(each).__qualname__ for each in objects)
    named = Counter(thread.name for thread in threading.enumerate())
    found = {
        "resident": before,
        "collected": collected,
        "trimmed": trimmed,
        "mlx": mx.get_active_memory(),
        "mlx_cache": mx.get_cache_memory(),
        "backups": sum(len(each.data) for each in objects if isinstance(each, LayerState)),
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
