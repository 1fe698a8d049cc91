"""SIGTERM at any moment of a process: while it starts, waits, loads, computes or drains.

Every round starts a coordinator and workers with clients, and sends each process SIGTERM at some moment. A process
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
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.chaos.crash import CRASHES
from tests.chaos.faults import wait_until
from tests.chaos.load import QUESTIONS, Answer, ask
from tests.support.processes.processes import Process, as_worker, launch_coordinator, launch_worker

WORKERS, CLIENTS = 3, 2

READY_SECONDS = 600.0
"""Seconds. Longest start of a worker. On a busy machine a start takes minutes, which is no crash."""

SERVED = 0.85
"""Share of the rounds whose workers compute answers before the first SIGTERM, however slow the machine is."""

MOMENTS = ("load", "serve", "at once", "random")
"""The moments of a SIGTERM: after a load begins, while a plan serves, at once, or at a random time."""

MOMENT_SECONDS = 8.0
"""Seconds. Longest wait for a moment. A coordinator with one worker less may neither load nor serve again soon."""

TWICE = 0.3
"""Share of the processes that get a second SIGTERM at once."""

FRESH_SECONDS = 1.0
"""Seconds since the newest piece of an answer in which its processes count as computing."""


def crash_of(process: Process, *, started: bool) -> str | None:
    """Return how an ended process crashed, or None. One that has not `started` may end by the signal."""
    status = process.popen.returncode
    allowed = (0,) if started else (0, -signal.SIGTERM)
    found = next((text for text in CRASHES if text in process.text()), None)
    if status in allowed and found is None:
        return None
    return f"{process.name} ended with {status}: {process.text()[-600:]}"


@dataclass
class Asking:
    """Clients that send one question after the other until the cluster has gone, and their present answers."""

    url: str
    answers: dict[int, Answer] = field(default_factory=dict)

    def start(self) -> None:
        """Start the clients."""
        for number in range(CLIENTS):
            threading.Thread(target=self._ask, args=(number,), daemon=True).start()

    def _ask(self, number: int) -> None:
        with contextlib.suppress(RuntimeError, httpx.HTTPError):
            while True:
                answer = self.answers[number] = Answer()
                ask(self.url, "builtin", random.choice(QUESTIONS), answer)

    @property
    def fresh(self) -> bool:
        """True if a client has just received a piece of its answer."""
        latest = [a.times[-1] for a in [*self.answers.values()] if len(a.times) > 1]
        return max(latest, default=0.0) > time.time() - FRESH_SECONDS


def phase_of(coordinator: Process) -> str:
    """Return the newest phase of a coordinator's cluster: loading, serving or another word."""
    messages = [str(record.get("message", "")) for record in coordinator.records()]
    phases = [m.removeprefix("cluster: ") for m in messages if m.startswith("cluster: ")]
    return phases[-1] if phases else "starting"


def state_of(process: Process, coordinator: Process, asking: Asking | None) -> str:
    """Return what a process does now, as far as the logs and the clients show it."""
    if process.records("draining: waiting until the coordinator plans without this worker"):
        return "drains"
    phase = phase_of(coordinator)
    if phase == "serving" and asking is not None and asking.fresh:
        bound = process is coordinator or process.records("connected")
        return "computes" if bound else "waits"
    return {"loading": "loads", "serving": "serves"}.get(phase, "waits")


def wait_for_moment(coordinator: Process, chance: random.Random) -> None:
    """Wait for one of MOMENTS, and for a short time after it."""
    moment, deadline = chance.choice(MOMENTS), time.monotonic() + MOMENT_SECONDS
    if moment in ("load", "serve"):
        wanted = "loading" if moment == "load" else "serving"
        while phase_of(coordinator) != wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.15 if moment == "load" else 1.5))
    elif moment == "random":
        time.sleep(chance.uniform(0.0, MOMENT_SECONDS / 2))


def end_while_starting(folder: Path, chance: random.Random) -> list[str]:
    """Start a worker, end it before it is ready, and return its crash, if any."""
    process = launch_worker(folder, "starting")
    time.sleep(chance.uniform(0.0, 3.0))
    ready = bool(process.records("worker ready"))
    process.stop()
    return [crash for crash in [crash_of(process, started=ready)] if crash]


def end_at_random(folder: Path, chance: random.Random, states: Counter[str]) -> list[str]:
    """Serve over workers under load, end every process at some moment, and return the crashes."""
    launched = [launch_worker(folder, f"w{i}", "--model", "builtin") for i in range(WORKERS)]
    coordinator = None
    try:
        workers = [as_worker(process, READY_SECONDS) for process in launched]
        flags = [flag for worker in workers for flag in ("--worker", worker.address)]
        coordinator = launch_coordinator(folder, "--model", "builtin", "--dtype", "float32", *flags)
        asking = None
        if chance.random() < SERVED:
            found = coordinator.wait_for("serving", READY_SECONDS)
            asking = Asking(str(found["url"]).removesuffix("/v1"))
            asking.start()
            wait_until(lambda: asking.fresh, READY_SECONDS)
        victims: list[Process] = [*workers, coordinator]
        chance.shuffle(victims)
        for victim in victims:
            wait_for_moment(coordinator, chance)
            program = "coordinator" if victim is coordinator else "worker"
            states[f"{program} {state_of(victim, coordinator, asking)}"] += 1
            victim.popen.terminate()
            if chance.random() < TWICE:
                victim.popen.send_signal(signal.SIGTERM)
        for victim in victims:
            victim.wait()
        served = bool(coordinator.records("serving"))
        crashes = [
            crash_of(victim, started=victim is not coordinator or served) for victim in victims
        ]
    finally:
        for process in [*launched, *([] if coordinator is None else [coordinator])]:
            process.kill()
    return [crash for crash in crashes if crash]


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, states, ends, crashes = random.Random(given.seed), Counter[str](), 0, []
    slow = 0
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = end_while_starting(Path(folder), chance)
            try:
                found += end_at_random(Path(folder), chance, states)
                ends += WORKERS + 1
            except AssertionError as error:  # a process was not ready in time, or ended by itself
                text = str(error)
                slow += " ended with " not in text
                found += [text] if " ended with " in text else []
        crashes += found
        ends += 1
        states["worker starts"] += 1
        print(
            f"{number + 1}: {ends} ends, {len(crashes)} crashes",
            dict(states),
            *found,
            file=sys.stderr,
            flush=True,
        )
    print(f"{ends} ends, {len(crashes)} crashes, {slow} rounds that were too slow to start")
    print("| at SIGTERM a … | ends |\n| --- | --- |")
    print(*(f"| {state} | {count} |" for state, count in sorted(states.items())), sep="\n")
    sys.exit(bool(crashes))


if __name__ == "__main__":
    main()
