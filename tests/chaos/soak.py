"""Hours' worth of requests over two workers: memory, descriptors, threads, asyncio tasks and latency over time.

Eight hours' worth are REQUESTS: three clients that each ask once every 20 seconds. The clients here ask as fast as they
get answers. They join, ask several small questions over one connection, leave some answers, and go. A worker is killed
after every KILL_REQUESTS. `python -m tests.chaos.soak --requests 4320` starts a run, whose curves are in
`build/bench/soak_hours.*`. `--chart docs/images` writes the chart of docs/failure.md. The run succeeds if no curve
grows, by the interval of its slope.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.bench.report import FOLDER, lines, publish
from tests.chaos.crash import crashes_of
from tests.chaos.trend import Trend, trend_of
from tests.support.processes.memory_report import ask_for_memory, growth
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

REQUESTS = 3 * 3 * 60 * 8
"""Requests in eight hours of three clients, each with three a minute."""

KILL_REQUESTS = REQUESTS // 24
"""Requests from kill to kill, which are those of 20 minutes."""

SAMPLES = 180
"""Samples of the processes in a run."""

PATIENT = ("--failure-timeout", "30")
"""Flags of the coordinator. Silence is no fault on a busy machine, and the kills of this run end connections."""

QUESTIONS, LONGEST_ANSWER = 12, 48
"""Most questions of a client before it goes, and most tokens of an answer."""

LEFT = 0.1
"""Share of the answers that a client leaves before their end."""

TOLERANCE = 0.03
"""Share of the mean. A growth whose interval is within it is flat, although it differs from zero."""

WARM = 0.2
"""Share of the samples at the start that are not judged: caches fill, and allocators find their size.

The largest cache is the ring of the stamps of 8,192 frames, which is full after about 800 requests.
"""


def quantile(seconds: Sequence[float], share: float) -> float | None:
    """Return a quantile in milliseconds, or None without a measurement."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


async def pieces(client: httpx.AsyncClient, model: str, tokens: int) -> AsyncIterator[float]:
    """Yield the time of each piece of a streamed answer. Raises RuntimeError with the status of a refused request."""
    body = {
        "model": model,
        "prompt": f"def read_{random.randrange(10**6)}(path):\n",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(str(reply.status_code))
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"][:60])
                yield time.perf_counter()


@dataclass
class Soak:
    """The state of a run: what the clients received since the last sample, and all samples."""

    url: str
    latencies: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[dict[str, float]] = field(default_factory=list)
    asked: int = 0
    """Requests so far."""

    async def run_client(self, number: int, requests: int) -> None:
        """Be one client after the other until `requests` were sent."""
        chance = random.Random(number)
        while self.asked < requests:
            async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
                self.counts["clients"] += 1
                for _ in range(chance.randint(1, QUESTIONS)):
                    await self._ask(client, chance)
            await asyncio.sleep(0.2 * chance.random())

    async def _ask(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        """Ask one question, and leave some answers early. An error event is counted."""
        self.asked += 1
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

    async def wait_for(self, requests: int) -> None:
        """Wait until `requests` were sent."""
        while self.asked < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def record(self, seconds: float, processes: dict[str, ResourceUse]) -> None:
        """Record a sample of the processes and of the latency since the last one."""
        row: dict[str, float] = {"requests": self.asked, "seconds": round(seconds, 1)}
        for name, use in processes.items():
            for what in ("memory", "descriptors", "threads", "tasks"):
                row[f"{name} {what}"] = getattr(use, what)
        for name, share in (("median", 0.5), ("95 %", 0.95)):
            key, value = f"first token {name}, ms", quantile(self.latencies, share)
            row[key] = (self.rows[-1][key] if self.rows else 0.0) if value is None else value
        self.latencies.clear()
        self.rows.append(row)

    def curve(self, name: str) -> list[float]:
        """Return one curve."""
        return [row[name] for row in self.rows]

    def trends(self) -> Iterator[tuple[str, Trend]]:
        """Yield the trend of each curve after the start of the run."""
        warm = int(len(self.rows) * WARM)
        for name in self.rows[0]:
            if name not in ("seconds", "requests"):
                yield name, trend_of(self.curve(name)[warm:])


async def run(
    soak: Soak, team: Team, coordinator: Coordinator, folder: Path, requests: int
) -> list[str]:
    """Run clients, kills and samples until `requests` were sent. Return what each process has more of at the end."""
    began = time.monotonic()
    processes = {"coordinator": coordinator.pid, "worker": team.workers[SURVIVOR].pid}
    clients = [asyncio.create_task(soak.run_client(number, requests)) for number in range(CLIENTS)]
    killing = asyncio.create_task(_kill_workers(soak, team, requests))
    early: dict[str, dict[str, Any]] = {}
    for number in range(1, SAMPLES + 1):
        await soak.wait_for(requests * number // SAMPLES)
        used = {
            name: await asyncio.to_thread(resource_use, pid, folder)
            for name, pid in processes.items()
        }
        soak.record(time.monotonic() - began, used)
        if number == int(SAMPLES * WARM):
            early = await _ask_for_memory(processes, folder)
        if number % 30 == 0:
            print(soak.rows[-1], dict(soak.counts), flush=True)
            write_rows(soak.rows)
    killing.cancel()
    await asyncio.gather(*clients)
    late = await _ask_for_memory(processes, folder)
    return [line for name in processes for line in _differences(name, early[name], late[name])]


async def _ask_for_memory(processes: dict[str, int], folder: Path) -> dict[str, dict[str, Any]]:
    return {
        name: await asyncio.to_thread(ask_for_memory, folder, pid)
        for name, pid in processes.items()
    }


def _differences(name: str, early: dict[str, Any], late: dict[str, Any]) -> Iterator[str]:
    """Yield the memory, the threads and the objects of a process in both reports."""
    for what in ("resident", "trimmed", "mlx", "mlx_cache", "backups"):
        yield f"{name}: {what} {early[what] / 1e6:.1f} to {late[what] / 1e6:.1f} MB"
    for what in ("threads", "python_threads"):
        if early[what] != late[what]:
            yield f"{name}: {what} {early[what]} to {late[what]}"
    yield f"{name}: more objects: {', '.join(growth(early, late)[:12]) or 'none'}"


async def _kill_workers(soak: Soak, team: Team, requests: int) -> None:
    """Kill a worker after every KILL_REQUESTS and start it again."""
    for asked in range(KILL_REQUESTS, requests, KILL_REQUESTS):
        await soak.wait_for(asked)
        victim = random.choice([n for n in range(WORKERS) if n != SURVIVOR])
        soak.counts["kills"] += 1
        await asyncio.to_thread(team.restart, victim, "builtin")


@contextmanager
def coordinating(folder: Path, team: Team) -> Iterator[Coordinator]:
    """Run a coordinator over the workers of `team`."""
    flags = [flag for address in team.addresses for flag in ("--worker", address)]
    module = "tests.support.processes.memory_report"
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


def publish_curves(soak: Soak, figures: dict[str, Any], folder: Path | None) -> None:
    """Write the figures and the charts of a run, and the chart of the docs into `folder`."""
    asked = soak.curve("requests")
    names = [name for name in soak.rows[0] if name not in ("seconds", "requests")]
    charts = {}
    for title, parts, unit in (
        ("memory", ("memory",), "MB"),
        ("counts", ("descriptors", "threads", "tasks"), "count"),
        ("first token", ("ms",), "ms"),
    ):
        chosen = [name for name in names if name.endswith(parts)]
        curves = {name.removesuffix(", ms"): soak.curve(name) for name in chosen}
        charts[title] = lines(asked, curves, "requests", unit)
    publish("soak_hours", figures, charts)
    if folder is not None:
        for suffix, name in ((".png", "soak-hours.png"), (".csv", "soak-hours.csv")):
            shutil.copy(FOLDER / f"soak_hours{suffix}", folder / name)


def main() -> None:
    """Run the soak, publish its curves, and exit with status 1 when a curve grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--chart", type=Path, help="the folder of the chart and of the samples")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as made,
        running_team(Path(made), "builtin", WORKERS, proxied=False) as team,
        coordinating(Path(made), team) as coordinator,
    ):
        soak = Soak(coordinator.url)
        more = asyncio.run(run(soak, team, coordinator, Path(made), given.requests))
        crashes = crashes_of(Path(made))
    write_rows(soak.rows)
    minutes = soak.rows[-1]["seconds"] / 60
    print(f"{soak.asked} requests in {minutes:.1f} minutes: {dict(soak.counts)}, crashes {crashes}")
    print(*more, sep="\n")
    print("| | mean | growth over the run, with its 95 % interval | |\n| --- | --- | --- | --- |")
    growing = []
    for name, trend in soak.trends():
        direction = trend.direction(TOLERANCE)
        growing += [name] * (direction == "grows")
        interval = f"{trend.growth:+.2f} ({trend.low:+.2f} to {trend.high:+.2f})"
        print(f"| {name} | {trend.mean:.1f} | {interval} | {direction} |")
    figures = {"counts": soak.counts, "growing": growing, "more": more, "rows": soak.rows}
    publish_curves(soak, figures, given.chart)
    if growing or crashes:
        raise SystemExit(f"growing: {', '.join(growing) or 'none'}; crashes {len(crashes)}")


if __name__ == "__main__":
    main()
