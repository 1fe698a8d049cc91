"""The cost of open pages for the coordinator: `python -m tests.browser.cost` prints it.

Two workers answer one stream while no, one or ten pages read the event stream, interleaved. The pages are plain readers
in this process: a browser would compete for the cores and measure itself.
"""

from __future__ import annotations

import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from tests.support.processes.processes import running_cluster

PAGES = (0, 1, 10)
TOKENS = 256


@contextmanager
def open_pages(url: str, count: int) -> Iterator[None]:
    """Read the event stream with `count` clients."""
    stop = threading.Event()
    ready = threading.Barrier(count + 1)

    def read() -> None:
        """Read until the end."""
        with httpx.stream("GET", f"{url}/v1/events", timeout=60) as reply:
            chunks = reply.iter_raw()
            next(chunks)
            ready.wait()
            for _ in chunks:
                if stop.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure(url: str, coordinator: psutil.Process) -> tuple[float, float]:
    """Return tokens a second of one answer, and the CPU seconds of the coordinator per second."""
    body = {
        "prompt": "def main():",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "seed": 1,
    }
    cpu, began = sum(coordinator.cpu_times()[:2]), time.perf_counter()
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    seconds = time.perf_counter() - began
    return TOKENS / seconds, (sum(coordinator.cpu_times()[:2]) - cpu) / seconds


def main(rounds: int = 20) -> None:
    """Measure and print the medians."""
    speeds: dict[int, list[float]] = {count: [] for count in PAGES}
    loads: dict[int, list[float]] = {count: [] for count in PAGES}
    with (
        TemporaryDirectory() as folder,
        running_cluster(Path(folder), "builtin", 2, "--mtp", "1", "--no-prefix-cache") as cluster,
    ):
        coordinator = psutil.Process(cluster.coordinator.pid)
        measure(cluster.url, coordinator)
        for turn in range(rounds):
            for count in PAGES[turn % 3 :] + PAGES[: turn % 3]:
                with open_pages(cluster.url, count):
                    speed, load = measure(cluster.url, coordinator)
                speeds[count].append(speed)
                loads[count].append(load)
    print(
        f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, {rounds} rounds"
    )
    for count in PAGES:
        ratios = [a / b for a, b in zip(speeds[count], speeds[0], strict=True)]
        print(
            f"{count:3} pages: {statistics.median(speeds[count]):6.1f} tokens/s, "
            f"{statistics.median(ratios):.3f} of no page (median of pairs), "
            f"coordinator uses {statistics.median(loads[count]):.3f} of a core"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
