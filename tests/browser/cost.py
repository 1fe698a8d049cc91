"""The cost of open pages: `python -m tests.browser.cost [MINUTES]` prints it, in seven minutes by default.

Two workers answer one stream while no, one or ten pages read the event stream. The three cases alternate within
seconds, on one cluster and with one prompt. Each round is its own mirror image, so a drift of the speed cancels out.
The pages are sockets that are read after each answer: a browser would compete for the cores and measure itself. The
cluster and the client have real-time priority where the system permits it, so other programs do not take their cores.

Two figures decide. The ratio of the speeds is what users see, but other programs disturb it. The processor time of the
coordinator is hardly disturbed. A page delays a token by at most the coordinator's additional processor time, so its
share of the whole time bounds the loss of speed.
"""

from __future__ import annotations

import os
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx

from tests.support.processes.processes import Cluster, running_cluster

PAGES = (0, 1, 10)
ORDERS = ((0, 1, 10, 1, 0), (1, 0, 10, 0, 1))
"""Numbers of pages in a round, in turn. The goal for one page is the narrowest, so one page is measured twice."""

GOALS = {1: 0.01, 10: 0.03}
"""Upper bound on the lost share of tokens a second, by the number of pages."""

TOKENS = 128
"""Tokens of one answer: about a second, as the time between two messages about frames' exact times."""

MINUTES = 7.0
RESAMPLES = 2000
"""Resamples of the rounds for each interval. More change its third digit."""

READ_BYTES = 1 << 16
SETTLE_SECONDS = 0.1
"""Seconds between the change of the open pages and an answer, so that the change itself is not measured."""

BODY = {
    "prompt": "def main():",
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "seed": 1,
}


@dataclass(frozen=True)
class Measurement:
    """One answer: its seconds, and the processor seconds of the coordinator and of all workers during it.

    Of several answers it has the means.
    """

    seconds: float
    coordinator: float
    workers: float


Round = dict[int, Measurement]
"""The measurements of one round by the number of open pages."""


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, by its clock of clock_getcpuclockid(3). /proc has steps of 10 ms."""
    return time.clock_gettime(~pid << 3 | 2)


def prioritize(cluster: Cluster) -> bool:
    """Give the cluster and this thread real-time priority, and return whether the system permits it."""
    try:
        for process in (cluster.coordinator, *cluster.workers):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    return True


@contextmanager
def open_pages(url: str, count: int) -> Iterator[None]:
    """Open the event stream `count` times. The system's buffers hold what arrives, which is read at the end."""
    address = urlsplit(url)
    with ExitStack() as stack:
        pages = []
        for _ in range(count):
            page = socket.create_connection((address.hostname, address.port))
            pages.append(stack.enter_context(page))
            page.sendall(f"GET /v1/events HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
            read_snapshot(page)
        time.sleep(SETTLE_SECONDS)
        yield
        for page in pages:
            assert page.recv(READ_BYTES), "the stream ended"
    time.sleep(SETTLE_SECONDS)


def read_snapshot(page: socket.socket) -> None:
    """Read the response's head and its first event."""
    received = page.recv(READ_BYTES)
    assert received.startswith(b"HTTP/1.1 200"), received
    while b"event: snapshot" not in received or b"\n\n" not in received:
        received += page.recv(READ_BYTES)


def measure_answer(cluster: Cluster, client: httpx.Client) -> Measurement:
    """Measure one answer."""
    workers = [worker.pid for worker in cluster.workers]
    before = cpu_seconds(cluster.coordinator.pid), sum(map(cpu_seconds, workers))
    began = time.perf_counter()
    client.post(f"{cluster.url}/v1/completions", json=BODY).raise_for_status()
    seconds = time.perf_counter() - began
    after = cpu_seconds(cluster.coordinator.pid), sum(map(cpu_seconds, workers))
    return Measurement(seconds, after[0] - before[0], after[1] - before[1])


def mean_of(answers: Sequence[Measurement]) -> Measurement:
    """Return the means of several answers."""
    columns = zip(*(astuple(answer) for answer in answers), strict=True)
    return Measurement(*map(statistics.fmean, columns))


def measure_rounds(minutes: float) -> list[Round]:
    """Measure rounds until `minutes` have passed."""
    rounds: list[Round] = []
    with (
        TemporaryDirectory() as folder,
        running_cluster(Path(folder), "builtin", 2, "--mtp", "1", "--no-prefix-cache") as cluster,
        httpx.Client(timeout=120) as client,
    ):
        for _ in range(3):
            measure_answer(cluster, client)
        print("real-time priority" if prioritize(cluster) else "normal priority")
        until = time.monotonic() + minutes * 60
        for order in cycle(ORDERS):
            if time.monotonic() > until:
                return rounds
            found: dict[int, list[Measurement]] = {count: [] for count in PAGES}
            for count in order:
                with open_pages(cluster.url, count):
                    found[count].append(measure_answer(cluster, client))
            rounds.append({count: mean_of(answers) for count, answers in found.items()})
    raise AssertionError("unreachable: cycle has no end")


Statistic = Callable[[Sequence[Round]], float]


def with_interval(rounds: Sequence[Round], statistic: Statistic) -> tuple[float, float, float]:
    """Return the statistic of the rounds, and its 95 % interval by resampling the rounds."""
    generator = random.Random(0)
    found = sorted(statistic(generator.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return statistic(rounds), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def speed_ratio(count: int) -> Statistic:
    """Return the statistic: tokens a second with `count` pages over those without."""
    return lambda rounds: middle_mean([r[0].seconds / r[count].seconds for r in rounds])


def cpu_share(count: int) -> Statistic:
    """Return the statistic: additional processor time of the coordinator over the time of an answer without pages."""

    def share(rounds: Sequence[Round]) -> float:
        """Return the share."""
        more = middle_mean([r[count].coordinator - r[0].coordinator for r in rounds])
        return more / statistics.median(r[0].seconds for r in rounds)

    return share


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of `values`: those are left out that other programs changed most."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def verdict(low: float, high: float, goal: float) -> str:
    """Return whether a cost between `low` and `high` meets `goal`."""
    return "met" if high <= goal else "missed" if low > goal else "not decided"


def report_rounds(rounds: Sequence[Round]) -> None:
    """Print the table."""
    print("pages  tokens/s  core s per 1,000 tokens: coordinator, workers")
    for count in PAGES:
        own = middle_mean([r[count].coordinator for r in rounds]) / TOKENS * 1000
        workers = middle_mean([r[count].workers for r in rounds]) / TOKENS * 1000
        speed = TOKENS / statistics.median(r[count].seconds for r in rounds)
        print(f"{count:5}  {speed:8.1f}  {own:.4f}, {workers:.4f}")
    for count, goal in GOALS.items():
        ratio, low, high = with_interval(rounds, speed_ratio(count))
        print(
            f"{count:2} pages, tokens/s of none: {ratio:.4f} ({low:.4f} to {high:.4f}); "
            f"goal {1 - goal:.2f}: {verdict(1 - high, 1 - low, goal)}"
        )
        share, low, high = with_interval(rounds, cpu_share(count))
        print(
            f"{count:2} pages, coordinator's additional share of a core: {share:.4f} "
            f"({low:.4f} to {high:.4f}); goal {goal:.2f}: {verdict(low, high, goal)}"
        )


def main(minutes: float = MINUTES) -> None:
    """Measure and print."""
    loads = [os.getloadavg()[0]]
    rounds = measure_rounds(minutes)
    loads.append(os.getloadavg()[0])
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {len(rounds)} rounds, "
        f"load average {loads[0]:.1f} before and {loads[1]:.1f} after"
    )
    report_rounds(rounds)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
