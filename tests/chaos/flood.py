"""The latency of two well-behaved clients while others flood, idle, stall, or send what is as large as possible.

`python -m tests.chaos.flood --seconds 15` runs every disturbance for some seconds against a coordinator of its own,
prints a table, and writes `build/bench/flood.json`. The disturbing clients are a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from coordinator.trust.key_ring import KeyRing, Scope
from mtp.builtin import checkpoint_dir
from tests.bench.report import lines, publish
from tests.chaos import disturbances
from tests.chaos.disturbances import BODIES, Received, Server
from tests.chaos.polite_clients import measure_latencies
from tests.support.processes.processes import (
    Coordinator,
    as_coordinator,
    ending,
    launch,
    running_workers,
)
from tests.support.processes.task_count import TASKS, ask_for_tasks

CONTEXT = 32_768
"""Tokens. Context of the model, so that prompts of 20,000 tokens are possible."""

OPEN_FILES = 16_000
SAMPLE_SECONDS = 0.25
SETTLE_SECONDS = 5.0
"""Seconds between two disturbances, in which the server must become idle again."""

Disturbance = Callable[[Server, Received], Awaitable[None]]


def kinds() -> dict[str, Disturbance | None]:
    """Return the disturbances by name. None leaves the two clients alone."""
    d = disturbances
    return {
        "undisturbed": None,
        "400 clients at once": d.flood,
        "2,000 idle connections": d.idle,
        "2,000 half heads": d.half_heads,
        "2,000 half bodies": d.half_bodies,
        "2,000 half TLS handshakes": d.half_handshakes,
        "4 long streams": d.readers,
        "4 long streams, not read": d.slow_readers,
        "20k-token prompts by 16 clients": d.long_prompts,
        **{f"16 MiB: {kind}": partial(d.large_bodies, kind) for kind in BODIES},
        "undisturbed afterwards": None,
    }


@dataclass
class Peaks:
    """The largest resource use of the coordinator while a disturbance lasted. Memory in MB."""

    memory: float = 0.0
    descriptors: int = 0
    threads: int = 0
    tasks: int = 0
    unanswered: bool = False
    """True if the coordinator did not report its tasks."""

    def sample(self, pid: int) -> None:
        """Update the peaks with the present use of process `pid`."""
        process = psutil.Process(pid)
        self.memory = max(self.memory, round(process.memory_info().rss / 1e6, 1))
        self.descriptors = max(self.descriptors, process.num_fds())
        self.threads = max(self.threads, process.num_threads())


@dataclass
class Row:
    """The measurements of one disturbance."""

    name: str
    latencies: dict[str, Any]
    peaks: Peaks
    received: Received = field(default_factory=Received)


def run_disturbance(name: str, server: Server, seconds: float, result: Connection) -> None:
    """Run a disturbance for `seconds` and send what it received. It is a process of its own."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    disturb, received = kinds()[name], Received()
    assert disturb is not None

    async def limited() -> None:
        """Run the disturbance until its time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await disturb(server, received)

    asyncio.run(limited())
    result.send(received)


def measure(
    name: str,
    coordinator: Coordinator,
    model: str,
    folder: Path,
    seconds: float,
    keys: tuple[str, str] = ("", ""),
) -> Row:
    """Measure both clients while a disturbance lasts. `keys` are the keys of the disturbing clients and of these."""
    row, ended = Row(name, {}, Peaks()), threading.Event()

    def watch() -> None:
        """Sample the coordinator until the measurement ends."""
        while not ended.wait(SAMPLE_SECONDS):
            row.peaks.sample(coordinator.pid)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = None
    if kinds()[name] is not None:
        context = multiprocessing.get_context("spawn")
        server = Server(coordinator.url, model, keys[0])
        process = context.Process(target=run_disturbance, args=(name, server, seconds + 3, sending))
        process.start()
        time.sleep(3)  # its imports and its connections
    try:
        row.latencies = asyncio.run(
            measure_latencies(coordinator.url, model, seconds, keys[1])
        ).row()
        with suppress(TimeoutError):
            row.peaks.tasks = ask_for_tasks(folder, coordinator.pid)
        if process is not None and receiving.poll(60):
            row.received = receiving.recv()
    finally:
        if process is not None:
            process.join(10)
            process.kill()
        ended.set()
        watching.join()
    return row


def long_model(folder: Path) -> Path:
    """Return a copy of the built-in model with a context of CONTEXT tokens."""
    made = folder / "long"
    shutil.copytree(checkpoint_dir(), made)
    config = json.loads((made / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (made / "config.json").write_text(json.dumps(config))
    return made


def made_keys(state: Path) -> tuple[str, str]:
    """Make a key for the disturbing clients and one for the others, and return both."""
    ring = KeyRing(state)
    flood, others = (
        ring.create(name, frozenset({Scope.INFERENCE})) for name in ("flood", "others")
    )
    return flood, others


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as plain JSON values."""
    received = {"counts": dict(row.received.counts), "longest": row.received.longest}
    return {**vars(row), "peaks": asdict(row.peaks), "received": received}


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    title = (
        "| | gap: median, 99 %, longest, ms | first token: median, 99 %, ms | peak MB | descriptors, threads, tasks "
        "| received |\n| --- | --- | --- | --- | --- | --- |"
    )
    found = [title]
    for row in rows:
        one, peaks = row.latencies, row.peaks
        counts = ", ".join(f"{n} x {what}" for what, n in row.received.counts.most_common(5))
        own = "; own: " * bool(one["refused"]) + ", ".join(
            f"{n} x {what}" for what, n in one["refused"].items()
        )
        longest = f"; longest {row.received.longest:.1f} s" if row.received.longest else ""
        found.append(
            f"| {row.name} | {one['gap_median_ms']}, {one['gap_p99_ms']}, {one['gap_longest_ms']} "
            f"| {one['first_median_ms']}, {one['first_p99_ms']} | {peaks.memory:.0f} "
            f"| {peaks.descriptors}, {peaks.threads}, {peaks.tasks} | {counts}{longest}{own} |"
        )
    return "\n".join(found)


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each disturbance")
    parser.add_argument("--only", default="", help="a part of the names of disturbances")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keys", action="store_true", help="disturbing clients share a named key")
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model, state = long_model(folder), folder / "state"
        keys = made_keys(state) if given.keys else ("", "")
        with running_workers(folder, model, given.workers) as workers:
            flags = [flag for worker in workers for flag in ("--worker", worker.address)]
            module = "tests.support.processes.counting_coordinator"
            arguments = [
                "serve",
                "--port",
                "0",
                "--no-mdns",
                "--model",
                str(model),
                "--state-dir",
                str(state),
                *flags,
                "--wait",
                "100",
            ]
            if not workers:
                arguments.append("--single-node")
            process = launch(folder, "coordinator", module, arguments, env={TASKS: made})
            with ending(process):
                coordinator = as_coordinator(process)
                for name in kinds():
                    if given.only not in name and "undisturbed" not in name:
                        continue
                    if rows:
                        time.sleep(SETTLE_SECONDS)
                    rows.append(measure(name, coordinator, model.name, folder, given.seconds, keys))
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
                    assert process.running, process.text()[-3000:]
                errors = [r for r in process.records() if r.get("level") in ("error", "critical")]
                tracebacks = process.text().count("Traceback")
    print("\n" + table(rows))
    print(f"\nerrors in the log: {len(errors)}, tracebacks: {tracebacks}")
    for record in errors[:5]:
        print(" ", str(record)[:600])
    figures = {
        "seconds": given.seconds,
        "rows": [as_json(row) for row in rows],
        "tracebacks": tracebacks,
    }
    numbers = list(range(len(rows)))
    curves = {
        "longest gap": [row.latencies["gap_longest_ms"] or 0.0 for row in rows],
        "first token, 99 %": [row.latencies["first_p99_ms"] or 0.0 for row in rows],
    }
    publish(
        "flood", figures, {"latency of others": lines(numbers, curves, "row of the table", "ms")}
    )


if __name__ == "__main__":
    main()
