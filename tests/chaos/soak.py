"""Hours' worth of requests over two workers: memory, descriptors, threads, asyncio tasks and latency over time.

Clients join, ask several small questions over one connection, leave some answers, and go. A worker is killed now and
then. `python -m tests.chaos.soak --minutes 480` starts a run, whose curves are in `build/bench/soak_hours.*`. The run
is flat if no curve has a trend, by the interval of its slope.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.bench.report import FOLDER, lines, publish
from tests.chaos.polite_clients import pieces, quantile
from tests.chaos.trend import BLOCKS, Trend, trend_of
from tests.support.processes.processes import (
    Coordinator,
    as_coordinator,
    ending,
    launch,
)
from tests.support.processes.resource_use import ResourceUse, resource_use
from tests.support.processes.task_count import TASKS
from tests.support.processes.team import Team, running_team

WORKERS, CLIENTS = 2, 3
SURVIVOR = 0
"""Number of the worker that is never killed, and whose resources are sampled."""

KILL_SECONDS = 180.0
"""Seconds from kill to kill."""

PATIENT = ("--failure-timeout", "30")
"""Flags of the coordinator. Silence is no fault on a busy machine, and the kills of this run end connections."""

SAMPLE_SECONDS = 10.0
QUESTIONS, LONGEST_ANSWER = 12, 48
"""Most questions of a client before it goes, and most tokens of an answer."""

LEFT = 0.1
"""Share of the answers that a client leaves before their end."""

TOLERANCE = 0.03
"""Share of the mean. A growth whose interval is within it is flat, although it differs from zero."""

WARM = 0.2
"""Share of the samples at the start that are not judged: caches fill, and allocators find their size."""


@dataclass
class Soak:
    """The state of a run: what the clients received since the last sample, and all samples."""

    url: str
    latencies: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[dict[str, float]] = field(default_factory=list)

    async def run_client(self, number: int, end: float) -> None:
        """Be one client after the other until the monotonic time `end`."""
        chance = random.Random(number)
        while time.monotonic() < end:
            async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
                self.counts["clients"] += 1
                for _ in range(chance.randint(1, QUESTIONS)):
                    await self._ask(client, chance)
            await asyncio.sleep(chance.random())

    async def _ask(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        """Ask one question, and leave some answers early. An error event is counted."""
        leaves, began, first = chance.random() < LEFT, time.perf_counter(), True
        try:
            async for now in pieces(client, "builtin", chance.randint(1, LONGEST_ANSWER)):
                if first:
                    self.latencies.append(now - began)
                elif leaves:
                    break
                first = False
        except (RuntimeError, httpx.HTTPError) as error:
            self.counts[f"failed: {str(error) or type(error).__name__}"[:60]] += 1
            await asyncio.sleep(1)
        else:
            self.counts["left" if leaves else "answers"] += 1

    def record(self, seconds: float, processes: dict[str, ResourceUse]) -> None:
        """Record a sample of the processes and of the latency since the last one."""
        row = {"seconds": round(seconds, 1)}
        for name, use in processes.items():
            for what in ("memory", "descriptors", "threads", "tasks"):
                row[f"{name} {what}"] = getattr(use, what)
        for name, share in (("median", 0.5), ("95 %", 0.95)):
            if (value := quantile(self.latencies, share)) is not None:
                row[f"first token {name}, ms"] = value
        self.latencies.clear()
        if self.rows:
            row = {key: row.get(key, self.rows[-1].get(key, 0.0)) for key in self.rows[0]}
        self.rows.append(row)

    def curve(self, name: str) -> list[float]:
        """Return one curve."""
        return [row[name] for row in self.rows]

    def trends(self) -> Iterator[tuple[str, Trend]]:
        """Yield the trend of each curve after the start of the run."""
        warm = int(len(self.rows) * WARM)
        for name in self.rows[0]:
            if name != "seconds":
                yield name, trend_of(self.curve(name)[warm:])


async def run(
    soak: Soak, team: Team, coordinator: Coordinator, folder: Path, minutes: float
) -> None:
    """Run clients, kills and samples for `minutes`."""
    began = time.monotonic()
    end = began + 60 * minutes
    clients = [asyncio.create_task(soak.run_client(number, end)) for number in range(CLIENTS)]
    killing = asyncio.create_task(_kill_workers(soak, team))
    while time.monotonic() < end:
        await asyncio.sleep(SAMPLE_SECONDS)
        survivor = team.workers[SURVIVOR]
        named = {"coordinator": coordinator.pid, "worker": survivor.pid}
        used = {
            name: await asyncio.to_thread(resource_use, pid, folder) for name, pid in named.items()
        }
        soak.record(time.monotonic() - began, used)
        if len(soak.rows) % 30 == 0:
            print(soak.rows[-1], dict(soak.counts), flush=True)
            write_rows(soak.rows)
    killing.cancel()
    await asyncio.gather(*clients)


async def _kill_workers(soak: Soak, team: Team) -> None:
    """Kill a worker every KILL_SECONDS and start it again."""
    while True:
        await asyncio.sleep(KILL_SECONDS)
        victim = random.choice([n for n in range(WORKERS) if n != SURVIVOR])
        soak.counts["kills"] += 1
        await asyncio.to_thread(team.restart, victim, "builtin")


@contextmanager
def coordinating(folder: Path, team: Team) -> Iterator[Coordinator]:
    """Run a coordinator over the workers of `team`."""
    flags = [flag for address in team.addresses for flag in ("--worker", address)]
    module = "tests.support.processes.counting_coordinator"
    options = [
        "serve",
        "--port",
        "0",
        "--no-mdns",
        "--model",
        "builtin",
        *flags,
        "--nodes",
        "2",
        *PATIENT,
    ]
    with ending(
        launch(folder, "coordinator", module, options, env={TASKS: str(folder)})
    ) as process:
        yield as_coordinator(process)


def write_rows(rows: Sequence[dict[str, float]]) -> None:
    """Write the samples as CSV."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "soak_hours.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Run the soak, publish its curves, and exit with status 1 when a curve is not flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    assert 60 * minutes * (1 - WARM) / SAMPLE_SECONDS > BLOCKS, "the run is too short for a trend"
    with (
        tempfile.TemporaryDirectory() as made,
        running_team(Path(made), "builtin", WORKERS, proxied=False) as team,
        coordinating(Path(made), team) as coordinator,
    ):
        soak = Soak(coordinator.url)
        asyncio.run(run(soak, team, coordinator, Path(made), minutes))
        tracebacks = coordinator.text().count("Traceback")
    write_rows(soak.rows)
    print(f"{dict(soak.counts)}, tracebacks {tracebacks}")
    print("| | mean | growth over the run, with its 95 % interval | |\n| --- | --- | --- | --- |")
    growing = []
    for name, trend in soak.trends():
        flat = trend.is_flat(TOLERANCE)
        growing += [] if flat else [name]
        interval = f"{trend.growth:+.2f} ({trend.low:+.2f} to {trend.high:+.2f})"
        print(f"| {name} | {trend.mean:.1f} | {interval} | {'flat' if flat else 'not flat'} |")
    hours = [seconds / 3600 for seconds in soak.curve("seconds")]
    names = [name for name in soak.rows[0] if name != "seconds"]
    charts = {}
    for title, part, unit in (
        ("memory", "memory", "MB"),
        ("counts", "descriptors", "count"),
        ("first token", "first token", "ms"),
    ):
        chosen = [
            n
            for n in names
            if part in n or (part == "descriptors" and n.endswith(("threads", "tasks")))
        ]
        charts[title] = lines(hours, {n: soak.curve(n) for n in chosen}, "hours", unit)
    figures = {"minutes": minutes, "counts": soak.counts, "not_flat": growing, "rows": soak.rows}
    publish("soak_hours", figures, charts)
    if growing:
        raise SystemExit(f"not flat: {', '.join(growing)}")


if __name__ == "__main__":
    main()
