"""The memory of a coordinator over thousands of mutated HTTP bodies, as the fuzz targets make them.

`python -m tests.chaos.mutated_bodies --count 20000` starts a run. Every 1,000 bodies it prints the coordinator's
resident memory, and at the end the memory after a collection and after malloc_trim, to tell leaks from fragmentation.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from tests.bench.report import lines, publish
from tests.fuzz.corpus import corpus
from tests.fuzz.mutation import SEPARATOR, mutate
from tests.support.processes.memory_report import ask_for_memory, growth
from tests.support.processes.processes import as_coordinator, ending, launch, running_workers
from tests.support.processes.task_count import TASKS

CLIENTS = 4
EVERY = 1000
"""Bodies between two samples."""

PATIENT = "60"
"""Seconds. Failure timeout: a coordinator without its worker would compute by itself, with more threads and memory."""

ANSWER_SECONDS = 1.0
"""Seconds after which a client leaves its answer. Mutated bodies may ask for thousands of tokens."""


async def send_bodies(
    url: str, count: int, pid: int, seed: int
) -> tuple[list[float], Counter[str]]:
    """Send `count` bodies from CLIENTS clients. Return the memory after every EVERY bodies, in MB, and the statuses."""
    originals, rng = corpus("http"), random.Random(seed)
    memory, statuses, sent = [_resident(pid)], Counter[str](), 0

    async def work(client: httpx.AsyncClient) -> None:
        """Send bodies until all are sent."""
        nonlocal sent
        while sent < count:
            sent += 1
            number = sent
            path, _, body = mutate(rng.choice(originals), originals, rng).partition(SEPARATOR)
            statuses[await _send(client, path, body)] += 1
            if number % EVERY == 0:
                memory.append(_resident(pid))
                print(f"{number:6} {memory[-1]:7.1f} MB {dict(statuses)}", flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(work(client) for _ in range(CLIENTS)))
    return memory, statuses


async def _send(client: httpx.AsyncClient, path: bytes, body: bytes) -> str:
    """Send one body, and read its answer for ANSWER_SECONDS. Return its status."""
    target = path.decode("latin-1")
    if not target.isascii() or not target.startswith("/") or not target.isprintable():
        target = "/v1/chat/completions"
    try:
        headers = {"Content-Type": "application/json"}
        async with asyncio.timeout(ANSWER_SECONDS):
            return str((await client.post(target, content=body, headers=headers)).status_code)
    except TimeoutError:
        return "left"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return type(error).__name__


def _resident(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


def _peak(pid: int) -> float:
    """Return the largest resident memory that a process ever had, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="0: the coordinator computes")
    parser.add_argument("--trace", action="store_true", help="trace the allocations of Python")
    given = parser.parse_args()
    env = {"PYTHONTRACEMALLOC": "5"} if given.trace else {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with running_workers(folder, "builtin", given.workers) as workers:
            flags = [flag for worker in workers for flag in ("--worker", worker.address)]
            flags += ["--failure-timeout", PATIENT] if workers else ["--single-node"]
            arguments = ["serve", "--port", "0", "--no-mdns", "--model", "builtin", *flags]
            module = "tests.support.processes.memory_report"
            process = launch(folder, "coordinator", module, arguments, env={TASKS: made, **env})
            with ending(process):
                coordinator = as_coordinator(process)
                asyncio.run(
                    send_bodies(coordinator.url, 200, process.pid, 0)
                )  # imports and first uses
                before = ask_for_memory(folder, process.pid)
                memory, statuses = asyncio.run(
                    send_bodies(coordinator.url, given.count, process.pid, given.seed)
                )
                time.sleep(10)
                peak = _peak(process.pid)
                after = ask_for_memory(folder, process.pid)
                (node,) = httpx.get(f"{coordinator.url}/status", timeout=60).json()["nodes"]
                tracebacks = process.text().count("Traceback")
                plans = len(process.records("cluster: serving"))
    for name in ("resident", "collected", "trimmed", "traced", "mlx", "mlx_cache", "backups"):
        print(f"{name:10} {before[name] / 1e6:8.1f} -> {after[name] / 1e6:8.1f} MB")
    print(f"peak {peak:.1f} MB")
    kept = ("memory_used", "memory_cached", "prefix_bytes", "weight_bytes")
    print("node, MB:", {key: round((node.get(key) or 0) / 1e6, 1) for key in kept})
    print("threads", before["threads"], "->", after["threads"])
    print("python threads", before["python_threads"], "->", after["python_threads"])
    print("more objects:", ", ".join(growth(before, after)) or "none")
    print(*after["allocations"], sep="\n")
    print("tracebacks", tracebacks, "plans", plans, dict(statuses))
    figures = {
        "count": given.count,
        "memory": memory,
        "peak": peak,
        "before": before,
        "after": after,
        "statuses": statuses,
    }
    numbers = [EVERY * n for n in range(len(memory))]
    publish(
        "mutated_bodies",
        figures,
        {"coordinator": lines(numbers, {"resident": memory}, "bodies", "MB")},
    )


if __name__ == "__main__":
    main()
