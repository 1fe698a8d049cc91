"""Progress under constant faults: a fault every few seconds, without a pause for the cluster to recover.

A run first measures the undisturbed throughput of the same clients, and then repeats the load under faults that come by
the clock. It compares every finished answer, and reports how long clients waited for the next token.
`python -m tests.chaos.storm --seconds 300 --every 10` starts a run.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from proto.state_dir import STATE_DIR
from tests.bench.machine import about
from tests.chaos.faults import SURVIVOR, Fault, Faults
from tests.chaos.load import Answer, HungError, Question, ask
from tests.chaos.pauses import SERVING, spread
from tests.support.processes.processes import as_coordinator, ending, launch_coordinator
from tests.support.processes.team import Place, running_team

WORKERS, CLIENTS = 4, 8

KINDS = ("kill", "stop", "cut", "freeze", "stuck", "restart", "replan")
"""Kinds of faults. `replan` asks the coordinator for a new plan."""

GROUP_KINDS = ("end member", "halt member", "kill", "stop", "restart", "replan")
"""Kinds of faults with groups: the process of a worker for its group is killed, or stopped and never continued.

No proxy lies before the workers, since it would not lie before these processes.
"""

FAULT_SECONDS = (3.5, 5.5)
"""Seconds. Shortest and longest duration of a stop or freeze; both exceed the default failure timeout."""

LINE = "def read_{0}(path):\n    with open(path) as file:\n        return file.read({0})\n\n"

QUESTIONS = tuple(
    Question("".join(LINE.format(i * 100 + n) for n in range(lines)), tokens, heat, i)
    for i, (lines, tokens, heat) in enumerate(
        (lines, 100 + 50 * (i % 4), 0.0 if i % 2 else 0.8)
        for i, lines in enumerate((4, 12, 24, 8, 32, 16, 48, 6, 20, 40, 10, 28))
    )
)
"""Greedy and sampled questions whose prompts have about 150 to 1,500 tokens."""


@dataclass
class Load:
    """Clients that repeat the questions until `stop`, and everything that they received."""

    url: str
    model: str
    wanted: dict[Question, Answer]
    answers: list[Answer] = field(default_factory=list)
    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Send questions one after the other, and compare each finished answer."""
        chance = random.Random(number)
        while not self._stop.is_set():
            question, answer = chance.choice(QUESTIONS), Answer()
            self.answers.append(answer)
            try:
                ask(self.url, self.model, question, answer)
            except (HungError, RuntimeError, httpx.HTTPError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                answer.times.append(time.time())  # the silence until the client gave up counts
                self._stop.wait(1.0)
                continue
            self.finished += 1
            wanted = self.wanted[question]
            if (answer.text, answer.tokens) != (wanted.text, wanted.tokens):
                self.wrong.append(f"{answer.text!r} instead of {wanted.text!r}")

    def stop(self) -> None:
        """Ask the clients to end after their present answers."""
        self.ended = time.time()
        self._stop.set()

    @property
    def silences(self) -> list[float]:
        """Return the longest silence of each answer in seconds, the wait for its first token included."""
        return [answer.pause for answer in self.answers]

    @property
    def pieces_per_second(self) -> float:
        """Pieces of text per second that arrived before `stop`."""
        pieces = sum(self.started < t <= self.ended for a in self.answers for t in a.times[1:])
        return pieces / (self.ended - self.started)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the report."""
        yield "answers finished", str(self.finished)
        yield "answers wrong, cut or refused", str(len(self.wrong))
        yield "pieces of text per second", f"{self.pieces_per_second:.2f}"
        begun = [Answer(times=answer.times[1:]).pause for answer in self.answers]
        for title, values in (("of an answer", self.silences), ("after its first token", begun)):
            median, most, longest = spread(values)
            figures = f"median {median:.1f}, 95 % {most:.1f}, most {longest:.1f}"
            yield f"silence {title}, s", figures
        over = sum(silence > 30 for silence in self.silences)
        yield "answers silent for over 30 s", f"{over} of {len(self.silences)}"


@contextmanager
def loading(url: str, model: str, wanted: dict[Question, Answer], count: int) -> Iterator[Load]:
    """Run `count` clients while the block runs. Their last answers have ended when it exits."""
    load = Load(url, model, wanted, started=time.time())
    threads = [threading.Thread(target=load.run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join(120)


class Storm:
    """Faults by the clock, one every `every` seconds. Equal seeds give the same faults."""

    def __init__(
        self,
        faults: Faults,
        url: str,
        seed: int,
        every: float,
        workers: int = WORKERS,
        all_kinds: Sequence[str] = KINDS,
    ) -> None:
        self.workers, self.all_kinds = workers, all_kinds
        self.faults, self.url, self.every = faults, url, every
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._kinds: list[str] = []

    def run(self, seconds: float) -> None:
        """Inject faults for `seconds`."""
        until = time.monotonic() + seconds
        while (due := time.monotonic()) < until:
            self._inject()
            time.sleep(max(0.0, due + self.every - time.monotonic()))

    def _inject(self) -> None:
        if not self._kinds:
            self._kinds = [*self.all_kinds]
            self._chance.shuffle(self._kinds)
        kind = self._kinds.pop()
        self.counts[kind] += 1
        ends = kind in ("kill", "restart")
        victim = self._chance.choice(
            [n for n in range(self.workers) if not (ends and n == SURVIVOR)]
        )
        seconds = self._chance.uniform(*FAULT_SECONDS)
        print(f"{time.strftime('%T')} {kind} w{victim}", file=sys.stderr, flush=True)
        if kind == "replan":
            headers = {"Content-Type": "application/json"}
            httpx.post(f"{self.url}/replan", headers=headers, timeout=60)
            return
        if kind in ("end member", "halt member"):
            for member in members_of(self.faults.team.workers[victim].pid):
                member.kill() if kind == "end member" else member.suspend()
            return
        fault = Fault(kind, victim, seconds)
        self.faults.inject(fault)
        time.sleep(0.0 if ends or kind == "cut" else seconds)
        self.faults.repair(fault)


def members_of(pid: int) -> list[psutil.Process]:
    """Return the processes of the worker `pid` that serve a group. A spare one listens to nothing yet."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if "--member" in child.cmdline() and child.net_connections("tcp"):
                found.append(child)
    return found


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the storm")
    parser.add_argument("--calm", type=float, default=60.0, help="length of the calm before it")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from fault to fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--parallel", default="pipeline", help="that of mtp-coord serve")
    parser.add_argument("--prefix-disk", help="that of mtp-worker, for each of them")
    parser.add_argument("--logs", type=Path, help="an empty folder for the logs of all processes")
    given = parser.parse_args()
    name, groups = Path(given.model).name, given.parallel != "pipeline"
    print(about())
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = given.logs or Path(made)
        disk = ("--prefix-disk", given.prefix_disk) if given.prefix_disk else ()
        places = [
            Place(flags=disk, env={STATE_DIR: str(folder / f"worker-{number}")})
            for number in range(given.workers)
        ]
        team = stack.enter_context(
            running_team(folder, given.model, given.workers, places, proxied=not groups)
        )
        flags = [flag for address in team.addresses for flag in ("--worker", address)]
        flags += ["--model", given.model, "--dtype", "float32", "--parallel", given.parallel]
        flags += ["--nodes", str(given.workers)]
        coordinator = as_coordinator(
            stack.enter_context(ending(launch_coordinator(folder, *flags)))
        )
        with ThreadPoolExecutor(given.clients) as pool:
            found = pool.map(lambda question: ask(coordinator.url, name, question), QUESTIONS)
            wanted = dict(zip(QUESTIONS, found, strict=True))
        with loading(coordinator.url, name, wanted, given.clients) as calm:
            time.sleep(given.calm)
        faults = Faults(team, given.model, coordinator.pid)
        kinds = GROUP_KINDS if groups else KINDS
        storm = Storm(faults, coordinator.url, given.seed, given.every, given.workers, kinds)
        with loading(coordinator.url, name, wanted, given.clients) as load:
            storm.run(given.seconds)
        records = coordinator.records()
    plans = sum(record.get("message") == SERVING for record in records)
    print(f"faults {sum(storm.counts.values())}, plans {plans}: {dict(storm.counts)}")
    for title, measured in (("undisturbed", calm), ("storm", load)):
        for row, value in measured.rows():
            print(f"{title:12} {row:32} {value}")
    print(f"throughput of the undisturbed: {load.pieces_per_second / calm.pieces_per_second:.2f}")
    for line in (calm.wrong + load.wrong)[:5]:
        print("  wrong:", line[:300])


if __name__ == "__main__":
    main()
