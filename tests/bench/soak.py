"""The memory of two workers under a limit, over many minutes of mixed requests: prompts, answers, cancels, pauses.

python -m tests.bench.soak --minutes 30

It ends with status 1 when MLX's memory, freed buffers included, exceeds the limit at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.bench.report import lines, publish
from tests.support.processes.processes import Cluster, running_cluster

LIMIT = 80 * 10**6
"""Bytes. The memory limit of each worker: a few times its weights, so that K/V, prefixes and caches compete."""

CLIENTS = 3
SAMPLE_SECONDS = 5.0
MAX_PROMPT, MAX_ANSWER = 3000, 150
"""Tokens."""

CANCELLED, PAUSED = 0.15, 0.1
"""Shares of the requests that the client leaves, and after which it waits until the workers are idle."""

IDLE_SECONDS = 4.0
MB = 1e6


@dataclass
class Sample:
    """The memory at one time, in bytes, of the worker that has the most."""

    seconds: float
    used: int
    cached: int
    resident: int

    @property
    def total(self) -> int:
        """The bytes that MLX holds."""
        return self.used + self.cached


async def soak(cluster: Cluster, minutes: float) -> tuple[list[Sample], int]:
    """Send requests for `minutes`, and return the samples and the number of finished requests."""
    samples: list[Sample] = []
    end = time.monotonic() + 60 * minutes
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
        tasks = [asyncio.create_task(_send_requests(client, seed, end)) for seed in range(CLIENTS)]
        started = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append(await _sample(client, cluster, time.monotonic() - started))
            if len(samples) % 12 == 0:
                _print_row(samples[-12:])
        return samples, sum(await asyncio.gather(*tasks))


async def _send_requests(client: httpx.AsyncClient, seed: int, end: float) -> int:
    """Send one request after another until the monotonic time `end`. Return their number."""
    rng, done = random.Random(seed), 0
    while time.monotonic() < end:
        length = int(MAX_PROMPT ** rng.random())
        start = 0 if rng.random() < 0.3 else rng.randrange(1000)  # some prompts share a prefix
        body = {
            "model": "builtin",
            "prompt": [3 + (start + i * 7) % 3000 for i in range(length)],
            "max_tokens": rng.randint(1, MAX_ANSWER),
            "stream": True,
            "temperature": rng.choice((0.0, 1.0)),
        }
        leave = rng.random() < CANCELLED
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if leave and '"text"' in line:
                    break
        done += 1
        if rng.random() < PAUSED:
            await asyncio.sleep(rng.random() * 2 * IDLE_SECONDS)
    return done


async def _sample(client: httpx.AsyncClient, cluster: Cluster, seconds: float) -> Sample:
    """Return the largest memory of a worker now."""
    nodes: list[dict[str, Any]] = (await client.get("/status")).json()["nodes"]
    largest = max(nodes, key=lambda node: node["memory_used"] + node["memory_cached"])
    resident = max(psutil.Process(w.popen.pid).memory_info().rss for w in cluster.workers)
    return Sample(seconds, largest["memory_used"], largest["memory_cached"], resident)


def _print_row(samples: list[Sample]) -> None:
    """Print the largest figures of a minute."""
    used, cached = max(s.used for s in samples) / MB, max(s.cached for s in samples) / MB
    total, resident = max(s.total for s in samples) / MB, max(s.resident for s in samples) / MB
    minute = samples[-1].seconds / 60
    print(f"{minute:6.1f} {used:8.1f} {cached:8.1f} {total:8.1f} {resident:10.1f}", flush=True)


def main() -> None:
    """Run the soak, publish its curves, and exit with status 1 when the limit was exceeded."""
    parser = argparse.ArgumentParser(description="Memory under a limit, over many minutes.")
    parser.add_argument("--minutes", type=float, default=3.0)
    minutes = parser.parse_args().minutes
    print("minute   in use   cached      sum   resident   (MB, largest of a minute)")
    flags = ("--memory-limit", f"{LIMIT / MB:g}MB")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(Path(folder), "builtin", 2, worker_flags=flags) as cluster,
    ):
        samples, requests = asyncio.run(soak(cluster, minutes))
    peak = max(s.total for s in samples)
    thirds = [samples[: len(samples) // 3], samples[-(len(samples) // 3) :]]
    growth = [sum(s.resident for s in third) / len(third) for third in thirds]
    figures = {
        "minutes": minutes,
        "requests": requests,
        "limit": LIMIT,
        "peak": peak,
        "resident_first_third": growth[0],
        "resident_last_third": growth[1],
        "samples": [vars(s) for s in samples],
    }
    print(json.dumps({k: v for k, v in figures.items() if k != "samples"}))
    minutes_of = [s.seconds / 60 for s in samples]
    curves = {
        "MLX in use": [s.used / MB for s in samples],
        "with freed buffers": [s.total / MB for s in samples],
        "limit": [LIMIT / MB] * len(samples),
        "resident": [s.resident / MB for s in samples],
    }
    publish(
        "soak", figures, {"largest memory of a worker": lines(minutes_of, curves, "minutes", "MB")}
    )
    if peak > LIMIT:
        sys.exit(f"the limit was exceeded: {peak / MB:.1f} of {LIMIT / MB:.0f} MB")


if __name__ == "__main__":
    main()
