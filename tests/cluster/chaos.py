"""Faults at random under load: what comes of the answers when workers are killed, stopped, drained and restarted.

A run first asks every question undisturbed, then asks them over and over while faults come in a seeded order, and
compares. Run a long one with `python -m tests.cluster.chaos --faults 200`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.cluster.processes import (
    Coordinator,
    Process,
    Worker,
    as_coordinator,
    as_worker,
    ending,
    launch_coordinator,
    launch_worker,
)

READ_SECONDS = 120.0
"""Longest silence a client bears; a client that waits longer counts as hung."""

PROMPT = "def read(path):\n    "
KINDS = ("kill", "stop", "drain")


@dataclass(frozen=True)
class Question:
    """One request. The same question has one answer."""

    prompt: str
    tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "top_p": 0.95,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


QUESTIONS = tuple(
    Question(PROMPT * (1 + i % 4), 24 + 12 * (i % 5), 0.0 if i % 2 else 0.8, i) for i in range(12)
)


@dataclass
class Report:
    """What a run found. Times in seconds; `pauses` are the longest silences within each stream."""

    faults: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    failed: list[str] = field(default_factory=list)
    differing: int = 0
    short: int = 0
    long: int = 0
    hung: int = 0
    pauses: list[float] = field(default_factory=list)
    descriptors: tuple[int, int] = (0, 0)
    threads: tuple[int, int] = (0, 0)
    memory_mb: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        worst = sorted(self.pauses)[-5:][::-1]
        rows = [
            ("faults injected", ", ".join(f"{n} {kind}" for kind, n in self.faults.items())),
            ("streams finished", self.finished),
            ("streams ended with an error", len(self.failed)),
            ("answers with tokens lost", self.short),
            ("answers with tokens too many", self.long),
            ("answers differing", self.differing),
            ("clients hung", self.hung),
            ("longest pauses, s", " ".join(f"{p:.1f}" for p in worst)),
            ("coordinator's file descriptors", "{} -> {}".format(*self.descriptors)),
            ("coordinator's threads", "{} -> {}".format(*self.threads)),
            ("coordinator's memory, MB", "{:.0f} -> {:.0f}".format(*self.memory_mb)),
        ]
        return "\n".join(f"{name:32} {value}" for name, value in rows)


def ask(url: str, model: str, question: Question) -> tuple[str, int, float]:
    """Text, completion tokens and the longest silence of one streamed answer.

    Raises httpx.ReadTimeout for a stream that hangs, RuntimeError for one that ends with an error.
    """
    text, tokens, pause, last = "", 0, 0.0, time.monotonic()
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=question.body(model), timeout=READ_SECONDS
    ) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode()[:200]}")
        ended = False
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                ended = True
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
            text += "".join(choice["text"] for choice in event["choices"])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not ended:
        raise RuntimeError("the stream was cut")
    return text, tokens, pause


class Workers:
    """The workers under attack. Each keeps its address over restarts, by its state directory."""

    def __init__(self, folder: Path, model: str, count: int) -> None:
        self.folder, self.model = folder, model
        self.starts = 0
        launched = [self._launch(f"w{i}") for i in range(count)]
        self.processes: dict[str, Worker] = {
            p.name.partition(".")[0]: as_worker(p) for p in launched
        }

    def _launch(self, name: str) -> Process:
        self.starts += 1
        state = str(self.folder / "state")
        arguments = ["--model", self.model, "--state-dir", state, "--name", name]
        return launch_worker(self.folder, f"{name}.{self.starts}", *arguments)

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.processes.values()]

    def hurt(self, name: str, kind: str, seconds: float) -> None:
        """Inject one fault, and mend it `seconds` later."""
        worker = self.processes[name]
        if kind == "stop":
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(worker.pid, signal.SIGCONT)
            return
        if kind == "kill":
            worker.kill()
        else:
            worker.stop()
        self.processes[name] = as_worker(self._launch(name))

    def end(self) -> None:
        for worker in self.processes.values():
            with ending(worker):
                pass


@contextmanager
def attacked(folder: Path, model: str, count: int) -> Iterator[Workers]:
    workers = Workers(folder, model, count)
    try:
        yield workers
    finally:
        workers.end()


@contextmanager
def coordinating(folder: Path, model: str, workers: Workers) -> Iterator[Coordinator]:
    flags = [flag for address in workers.addresses for flag in ("--worker", address)]
    flags += ["--model", model, "--dtype", "float32", "--failure-timeout", "1.5"]
    with ending(launch_coordinator(folder, *flags)) as process:
        yield as_coordinator(process)


def run(
    folder: Path, model: str, faults: int, *, seed: int, workers: int = 4, clients: int = 3
) -> Report:
    """Inject `faults` faults, one at a time, while `clients` clients ask without end."""
    chance = random.Random(seed)
    report = Report()
    with (
        attacked(folder, model, workers) as attack,
        coordinating(folder, model, attack) as coordinator,
    ):
        name = Path(model).name
        wanted = {q: ask(coordinator.url, name, q)[:2] for q in QUESTIONS}
        me = psutil.Process(coordinator.pid)
        before = me.num_fds(), me.num_threads(), me.memory_info().rss / 1e6
        stop = threading.Event()
        threads = [
            threading.Thread(target=_client, args=(coordinator.url, name, wanted, report, stop, i))
            for i in range(clients)
        ]
        for thread in threads:
            thread.start()
        for _ in range(faults):
            time.sleep(chance.uniform(0.3, 1.5))
            kind, victim = chance.choice(KINDS), chance.choice(list(attack.processes))
            attack.hurt(victim, kind, chance.uniform(0.5, 3.0))
            report.faults[kind] += 1
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(2 * READ_SECONDS)
            report.hung += thread.is_alive()
        after = me.num_fds(), me.num_threads(), me.memory_info().rss / 1e6
        report.descriptors = before[0], after[0]
        report.threads = before[1], after[1]
        report.memory_mb = before[2], after[2]
    return report


def _client(
    url: str,
    model: str,
    wanted: dict[Question, tuple[str, int]],
    report: Report,
    stop: threading.Event,
    number: int,
) -> None:
    chance = random.Random(number)
    while not stop.is_set():
        question = chance.choice(QUESTIONS)
        try:
            text, tokens, pause = ask(url, model, question)
        except httpx.ReadTimeout:
            report.hung += 1
        except (RuntimeError, httpx.HTTPError) as error:
            report.failed.append(f"{type(error).__name__}: {error}")
        else:
            report.finished += 1
            report.pauses.append(pause)
            report.short += tokens < wanted[question][1]
            report.long += tokens > wanted[question][1]
            report.differing += text != wanted[question][0]


def main() -> None:
    """The long study, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="builtin")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), given.model, given.faults, seed=given.seed)
    print(report)
    for line in report.failed[:5]:
        print("  error:", line)


if __name__ == "__main__":
    main()
