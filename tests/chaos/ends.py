"""SIGTERM at any moment of a worker's life: while it starts, waits, loads, computes or drains.

Every round starts a coordinator and workers with clients, and sends each worker SIGTERM after a random time. A worker
must end with status 0, or by the signal itself before it handles signals, and its log must have no trace of a crash.
`python -m tests.chaos.ends --rounds 100` starts a run.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.chaos.crash import CRASHES
from tests.chaos.load import QUESTIONS, ask
from tests.support.processes.processes import (
    Process,
    as_worker,
    ending,
    launch_coordinator,
    launch_worker,
)

WORKERS, CLIENTS = 3, 2

READY_SECONDS = 600.0
"""Seconds. Longest start of a worker. On a busy machine a start takes minutes, which is no crash."""

LATEST = 8.0
"""Seconds. Latest SIGTERM after all workers are ready, or after they serve."""

SERVED = 0.6
"""Share of the rounds whose workers serve before the first SIGTERM, however slow the machine is."""


def crash_of(process: Process, *, started: bool) -> str | None:
    """Return how an ended process crashed, or None. One that has not `started` may end by the signal."""
    status = process.popen.returncode
    allowed = (0,) if started else (0, -signal.SIGTERM)
    found = next((text for text in CRASHES if text in process.text()), None)
    if status in allowed and found is None:
        return None
    return f"{process.name} ended with {status}: {process.text()[-600:]}"


def ask_until_it_fails(url: str) -> None:
    """Send one question after the other until the cluster has gone."""
    with contextlib.suppress(RuntimeError, httpx.HTTPError):
        while True:
            ask(url, "builtin", random.choice(QUESTIONS))


def end_while_starting(folder: Path, chance: random.Random) -> list[str]:
    """Start a worker, end it before it is ready, and return its crash, if any."""
    process = launch_worker(folder, "starting")
    time.sleep(chance.uniform(0.0, 3.0))
    ready = bool(process.records("worker ready"))
    process.stop()
    return [crash for crash in [crash_of(process, started=ready)] if crash]


def end_at_random(folder: Path, chance: random.Random, states: Counter[str]) -> list[str]:
    """Serve over workers under load, end each at a random moment, and return the crashes."""
    launched = [launch_worker(folder, f"w{i}", "--model", "builtin") for i in range(WORKERS)]
    crashes = []
    try:
        workers = [as_worker(process, READY_SECONDS) for process in launched]
        flags = [flag for worker in workers for flag in ("--worker", worker.address)]
        coordinator = launch_coordinator(folder, "--model", "builtin", "--dtype", "float32", *flags)
        with ending(coordinator):
            if chance.random() < SERVED:
                coordinator.wait_for("serving", READY_SECONDS)
            moments = sorted((chance.uniform(0.0, LATEST), worker) for worker in workers)
            begun, asking = time.monotonic(), False
            for moment, worker in moments:
                while time.monotonic() < begun + moment:
                    if not asking and (found := coordinator.records("serving")):
                        asking = True
                        url = str(found[0]["url"]).removesuffix("/v1")
                        for _ in range(CLIENTS):
                            threading.Thread(
                                target=ask_until_it_fails, args=(url,), daemon=True
                            ).start()
                    time.sleep(0.02)
                states[worker.records()[-1]["message"][:30]] += 1
                worker.popen.terminate()
                if chance.random() < 0.3:
                    worker.popen.send_signal(signal.SIGTERM)
            for worker in workers:
                worker.wait()
        crashes = [c for worker in workers if (c := crash_of(worker, started=True))]
        if crash := crash_of(coordinator, started=bool(coordinator.records("serving"))):
            crashes.append(crash)
    finally:
        for process in launched:
            process.kill()
    return crashes


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, states, ends, crashes = random.Random(given.seed), Counter[str](), 0, []
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = end_while_starting(Path(folder), chance)
            found += end_at_random(Path(folder), chance, states)
        crashes += found
        ends += WORKERS + 2
        print(
            f"{number + 1}: {ends} ends, {len(crashes)} crashes",
            *found,
            file=sys.stderr,
            flush=True,
        )
    print(f"{ends} ends, {len(crashes)} crashes; last records before SIGTERM: {dict(states)}")
    sys.exit(bool(crashes))


if __name__ == "__main__":
    main()
