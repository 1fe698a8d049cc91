"""SIGTERM at any moment of a process: while it starts, waits, loads, computes or drains.

Every round starts a coordinator and workers with clients, and sends each process SIGTERM at some moment. A process
must end with status 0, or by the signal itself before it handles signals, and its log must have no trace of a crash.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from tests.chaos.faults import wait_until
from tests.chaos.load import QUESTIONS, Answer, ask
from tests.chaos.report import CRASHES
from tests.support.processes.processes import Process, as_worker, launch_coordinator, launch_worker

WORKERS, CLIENTS = 3, 2

READY_SECONDS = 600.0
"""Seconds. Longest start of a worker. On a busy machine a start takes minutes, which is no crash."""

SERVED = 0.85
"""Share of the rounds whose workers compute answers before the first SIGTERM, however slow the machine is."""

MOMENTS = ("loading", "serving", "at once", "random")
"""The moments of a SIGTERM: after a load begins, while a plan serves, at once, or at a random time."""

MOMENT_SECONDS = 8.0
"""Seconds. Longest wait for a moment. A coordinator with one worker less may neither load nor serve again soon."""

TWICE = 0.3
"""Share of the processes that get a second SIGTERM at once."""


def crash_of(process: Process, *, started: bool) -> list[str]:
    """Return how an ended process crashed, if it did. One that has not `started` may end by the signal."""
    status = process.popen.returncode
    allowed = (0,) if started else (0, -signal.SIGTERM)
    if status in allowed and not any(text in process.text() for text in CRASHES):
        return []
    return [f"{process.name} ended with {status}: {process.text()[-600:]}"]


def ask_until_gone(url: str, answer: Answer) -> None:
    """Send one question after the other until the cluster has gone."""
    with contextlib.suppress(RuntimeError, httpx.HTTPError):
        while True:
            ask(url, "builtin", random.choice(QUESTIONS), answer)


def phase_of(coordinator: Process) -> str:
    """Return the newest phase of a coordinator's cluster: loading, serving or another word."""
    messages = (str(record.get("message", "")) for record in coordinator.records())
    phases = [m.removeprefix("cluster: ") for m in messages if m.startswith("cluster: ")]
    return phases[-1] if phases else "starting"


def wait_for_moment(coordinator: Process, chance: random.Random) -> None:
    """Wait for one of MOMENTS, and for a short time after it."""
    moment = chance.choice(MOMENTS)
    if moment in ("loading", "serving"):
        wait_until(lambda: phase_of(coordinator) == moment, MOMENT_SECONDS)
        time.sleep(chance.uniform(0.0, 0.15 if moment == "loading" else 1.5))
    elif moment == "random":
        time.sleep(chance.uniform(0.0, MOMENT_SECONDS / 2))


def end_while_starting(folder: Path, chance: random.Random) -> list[str]:
    """Start a worker, end it before it is ready, and return its crash, if any."""
    process = launch_worker(folder, "starting")
    time.sleep(chance.uniform(0.0, 3.0))
    ready = bool(process.records("worker ready"))
    process.stop()
    return crash_of(process, started=ready)


def end_at_random(folder: Path, chance: random.Random) -> list[str]:
    """Serve over workers under load, end every process at some moment, and return the crashes."""
    launched = [launch_worker(folder, f"w{i}", "--model", "builtin") for i in range(WORKERS)]
    try:
        workers = [as_worker(process, READY_SECONDS) for process in launched]
        flags = [flag for worker in workers for flag in ("--worker", worker.address)]
        coordinator = launch_coordinator(folder, "--model", "builtin", "--dtype", "float32", *flags)
        launched.append(coordinator)
        if chance.random() < SERVED:
            url = str(coordinator.wait_for("serving", READY_SECONDS)["url"]).removesuffix("/v1")
            answers = [Answer() for _ in range(CLIENTS)]
            for answer in answers:
                threading.Thread(target=ask_until_gone, args=(url, answer), daemon=True).start()
            wait_until(lambda: any(answer.text for answer in answers), READY_SECONDS)
        victims: list[Process] = [*workers, coordinator]
        chance.shuffle(victims)
        for victim in victims:
            wait_for_moment(coordinator, chance)
            victim.popen.terminate()
            if chance.random() < TWICE:
                victim.popen.send_signal(signal.SIGTERM)
        for victim in victims:
            victim.wait()
        served = bool(coordinator.records("serving"))
        return [crash for victim in victims for crash in crash_of(victim, started=victim is not coordinator or served)]
    finally:
        for process in launched:
            process.kill()


def end_processes(ends: int, seed: int) -> list[str]:
    """End at least `ends` processes in rounds. Return the crashes, and rounds that were too slow to start."""
    chance, found = random.Random(seed), list[str]()
    for done in range(0, ends, WORKERS + 2):
        with tempfile.TemporaryDirectory() as folder:
            found += end_while_starting(Path(folder), chance)
            try:
                found += end_at_random(Path(folder), chance)
            except AssertionError as error:  # a process was not ready in time, or ended by itself
                found.append(str(error))
        print(f"{done + WORKERS + 2} ends", *found, file=sys.stderr, flush=True)
    return found
