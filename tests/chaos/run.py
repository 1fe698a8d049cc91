"""Random faults under load: processes, networks and machines fail while clients compare answers.

A run first asks every question without faults. It then repeats the questions while faults come in a seeded order, and
compares the answers. `python -m tests.chaos.run --faults 200 --seed 1` starts a long run. With
`--workers 1 --serve mtp=off` every plan is one stage that runs ahead of the coordinator. `--kinds network` and
`--kinds host` choose other faults.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.crash import crashes_of
from tests.chaos.faults import (
    GROUPS,
    KINDS,
    NETWORK_KINDS,
    PROXY_KINDS,
    SURVIVOR,
    Fault,
    Faults,
    schedule,
    wait_until,
    why_impossible,
)
from tests.chaos.load import QUESTIONS, Answer, Clients, Question, ask, clients
from tests.chaos.pauses import REPLAN, Injected, episodes, silence_during
from tests.chaos.report import Report
from tests.chaos.served_by import pieces_by_workers
from tests.chaos.surroundings import Surroundings, surroundings
from tests.support.processes.processes import Coordinator, as_coordinator, ending, launch
from tests.support.processes.resource_use import resource_use
from tests.support.processes.task_count import TASKS
from tests.support.processes.team import Place, Team, running_team

FAILURE_TIMEOUT = 2.0
PATIENT_TIMEOUT = 4.0
"""Seconds. Failure timeout under faults of networks and hosts. With less, a busy machine is one more fault."""

WORKERS = 4
"""Three workers for the plan and one spare."""

FEW_WORKERS = 3
"""Workers under faults of networks and hosts. Two stay while one is lost, so plans nearly always have hops."""

CLIENTS = 3
LONGER_SECONDS = (0.5, 2.0)
"""Seconds. Shortest and longest time by which a fault exceeds the failure timeout."""

REPLAN_SECONDS = 3.0
"""Seconds between two requests for a plan over all workers."""

STUCK_SECONDS = 5.0
"""Seconds. Longest additional wait until a blocked engine is noticed. One that no plan uses is never noticed."""

BACK_SECONDS = 40.0
"""Seconds. Longest wait until a repaired worker can serve again."""

ENDED = threading.Event()
"""Set by SIGTERM: the run ends after the present fault, and reports."""

SAMPLES = 10
"""Number of samples of the processes' resource use over a run."""


@contextmanager
def coordinating(
    folder: Path,
    model: str,
    team: Team,
    options: Sequence[str] = (),
    place: Place | None = None,
    timeout: float = FAILURE_TIMEOUT,
) -> Iterator[Coordinator]:
    """Run a coordinator over the workers of `team`, with further `options` of `mtp-coord serve`.

    The layers compute in fp32, unless `options` name another type.
    """
    place = place or Place()
    flags = [flag for address in team.addresses for flag in ("--worker", address)]
    flags += [
        "--model",
        model,
        "--dtype",
        "float32",
        "--port",
        "0",
        "--no-mdns",
        "--no-auto-replan",
    ]
    flags += ["--failure-timeout", str(timeout), *place.flags, *options]
    module = "tests.support.processes.no_back_off_coordinator"
    env = {TASKS: str(folder), "MTP_STATE_DIR": str(folder / "state"), **place.env}
    launched = launch(
        folder, "coordinator", module, ["serve", *flags], env=env, prefix=place.prefix
    )
    with ending(launched) as process:
        yield as_coordinator(process)


class Run:
    """One run: its processes, its faults and its report."""

    def __init__(self, folder: Path, team: Team, coordinator: Coordinator, faults: Faults) -> None:
        self.folder, self.team, self.coordinator, self.faults = folder, team, coordinator, faults
        self.report = Report()
        self.injected: list[Injected] = []

    def status(self) -> dict[str, Any]:
        """Return the coordinator's /status reply."""
        found: dict[str, Any] = httpx.get(f"{self.coordinator.url}/status", timeout=60).json()
        return found

    def all_healthy(self) -> bool:
        """Return True if every worker can serve and a plan serves."""
        found = self.status()
        well = [n for n in found["nodes"] if n["address"] and n["health"] in ("ready", "idle")]
        return found["ready"] and len(well) == len(self.team.workers)

    def use_workers(self) -> bool:
        """Ask for plans until one uses two workers, or all if there are fewer. Return False if none does in time.

        On a busy machine a plan may end without a fault, and the run would hit workers that no plan uses.
        """
        deadline = time.monotonic() + BACK_SECONDS
        while not wait_until(self.spans_workers, REPLAN_SECONDS):
            if time.monotonic() > deadline:
                return False
            self.replan()
        return True

    def spans_workers(self) -> bool:
        """Return True if a plan serves over two workers, or over all if there are fewer."""
        found = self.status()
        used = [node for node in found["nodes"] if node["address"] and node["span"]]
        return found["ready"] and len(used) >= min(2, len(self.team.workers))

    def health(self) -> str:
        """Return the health of every node, with its reason if it has one."""
        found = self.status()
        nodes = (f"{n['name']} {n['health']} {n['detail']}".strip() for n in found["nodes"])
        return f"{'ready' if found['ready'] else 'not ready'}; {'; '.join(nodes)}"

    def sample(self) -> None:
        """Record the resource use of the coordinator and of the surviving worker."""
        survivor = self.team.workers[SURVIVOR]
        for name, process in (("coordinator", self.coordinator), ("worker", survivor)):
            self.report.resource_use.setdefault(name, []).append(
                resource_use(process.pid, self.folder)
            )

    def inject_and_repair(self, fault: Fault, pace: float, asking: Clients) -> None:
        """Inject `fault`, repair it, and wait until every worker is part of the cluster again."""
        if not self.use_workers():
            self.report.not_back.append(f"before {fault}: {self.health()}")
        epoch = self.status()["epoch"]
        started = time.time()
        self.faults.inject(fault)
        time.sleep(fault.seconds)
        if not self.coordinator.running:
            text = self.coordinator.text()[-2000:]
            raise RuntimeError(f"the coordinator ended during {fault}: {text}")
        if fault.kind == "stuck":  # a frame of a new size has a longer deadline
            wait_until(lambda: self.status()["epoch"] != epoch, STUCK_SECONDS)
        self.faults.repair(fault)
        if not wait_until(self.all_healthy, BACK_SECONDS):
            self.report.not_back.append(f"{fault}: {self.health()}")
        self.injected.append(Injected(fault.kind, started, time.time()))
        self.report.faults[fault.kind] += 1
        self.replan()
        repaired = time.time()
        # On a busy machine the next fault would otherwise end a plan that has not computed anything.
        if not wait_until(lambda: asking.latest > repaired, BACK_SECONDS):
            self.report.not_back.append(f"{fault}: no client received anything")
        time.sleep(max(0.0, pace - (time.time() - started)))

    def replan(self) -> None:
        """Request a new plan, so that recovered workers are used again."""
        headers = {"Content-Type": "application/json"}
        started = time.time()
        httpx.post(f"{self.coordinator.url}/replan", headers=headers, timeout=60)
        wait_until(self.all_healthy, BACK_SECONDS)
        self.injected.append(Injected(REPLAN, started, time.time()))

    def go(self, due: Sequence[Fault], pace: float, asking: Clients, *, verbose: bool) -> None:
        """Inject the faults `due`, `pace` seconds apart, while the clients `asking` run."""
        time.sleep(1.0)  # every client has sent its first request
        for i, fault in enumerate(due):
            if ENDED.is_set():
                break
            if i % max(1, len(due) // SAMPLES) == 0:
                self.sample()
            self.inject_and_repair(fault, pace, asking)
            if verbose:
                outcome = asking.outcome
                done = f"{i + 1}/{len(due)} {fault.kind} w{fault.victim}:"
                found = f"{outcome.finished} finished {len(outcome.wrong)} wrong"
                print(time.strftime("%T"), done, found, file=sys.stderr, flush=True)
        self.sample()

    def complete_report(self, asking: Clients) -> Report:
        """Return the report, with the findings of the clients and of the logs."""
        report, answers = self.report, asking.outcome.answers
        report.outcome = asking.outcome
        found = episodes(self.injected, self.coordinator.records(), answers)
        report.episodes = [episode for episode in found if episode.kind != REPLAN]
        report.replans = [episode for episode in found if episode.kind == REPLAN]
        report.pieces = pieces_by_workers(self.coordinator.records(), answers)
        for fault in self.injected:
            longest = silence_during(fault, answers)
            report.silences.setdefault(fault.kind, []).append(longest)
        return report


def undisturbed(url: str, model: str) -> dict[Question, Answer]:
    """Return the answers without faults, with as many concurrent clients as the run has."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = pool.map(lambda question: ask(url, model, question), QUESTIONS)
        return dict(zip(QUESTIONS, answers, strict=True))


def run(
    folder: Path,
    model: str,
    faults: int,
    *,
    seed: int,
    pace: float = 0.0,
    verbose: bool = False,
    options: Sequence[str] = (),
    workers: int = WORKERS,
    kinds: Sequence[str] = KINDS,
) -> Report:
    """Inject `faults` faults of these kinds, one at a time and `pace` seconds apart, under load. Return the report.

    Equal seeds give the same faults in the same order. `options` are those of `mtp-coord serve`.
    """
    started = time.monotonic()
    timeout = FAILURE_TIMEOUT if {*kinds} <= {*KINDS} else PATIENT_TIMEOUT
    seconds = (timeout + LONGER_SECONDS[0], timeout + LONGER_SECONDS[1])
    due = schedule(seed, faults, workers, seconds, kinds)
    with surroundings(folder, workers, kinds, seed) as around:
        report = _run_in(around, folder, model, due, pace, verbose, options, timeout)
    report.crashes = crashes_of(folder)
    report.seconds = time.monotonic() - started
    return report


def _run_in(
    around: Surroundings,
    folder: Path,
    model: str,
    due: Sequence[Fault],
    pace: float,
    verbose: bool,
    options: Sequence[str],
    timeout: float,
) -> Report:
    proxied = around.network is None
    with (
        running_team(folder, model, len(around.places), around.places, proxied=proxied) as team,
        coordinating(folder, model, team, options, around.coordinator, timeout) as coordinator,
    ):
        name = Path(model).name
        wanted = undisturbed(coordinator.url, name)
        faults = Faults(
            team,
            model,
            coordinator.pid,
            address=coordinator.url.removeprefix("http://"),
            network=around.network,
            hosts=around.hosts,
        )
        doing = Run(folder, team, coordinator, faults)
        with clients(coordinator.url, name, wanted, CLIENTS) as asking:
            doing.go(due, pace, asking, verbose=verbose)
        return doing.complete_report(asking)


def chosen_kinds(words: str) -> list[str]:
    """Return the kinds named by `words`, groups or kinds with commas between. Print those that are impossible here.

    Raises ValueError for an unknown kind, and for kinds that exclude each other.
    """
    kinds = [kind for word in words.split(",") for kind in GROUPS.get(word, (word,))]
    known = [kind for group in GROUPS.values() for kind in group]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(
            f"unknown kind of fault: {unknown[0]}. Use {', '.join([*GROUPS, *known])}."
        )
    if {*PROXY_KINDS} & {*kinds} and {*NETWORK_KINDS} & {*kinds}:
        raise ValueError("cut and freeze need proxies, which the network has not. Use two runs.")
    reasons = {kind: why_impossible(kind) for kind in kinds}
    for kind, reason in reasons.items():
        if reason is not None:
            print(f"left out: {kind}: {reason}", flush=True)
    return [kind for kind, reason in reasons.items() if reason is None]


def main() -> None:
    """Run the long study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=6.0, help="seconds from fault to fault")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--serve", default="", help="options of serve, such as mtp=off")
    parser.add_argument("--kinds", default="process", help="process, network, host, or kinds")
    parser.add_argument("--workers", type=int, help="4; under faults of networks and hosts 3")
    parser.add_argument("--logs", type=Path, help="an empty folder for the logs of all processes")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: ENDED.set())
    options = [f"--{option}" for option in given.serve.split(",") if option]
    try:
        kinds = chosen_kinds(given.kinds)
    except ValueError as error:
        parser.error(str(error))
    if not kinds:
        print("no fault of these kinds is possible on this system")
        return
    workers = given.workers or (WORKERS if {*kinds} <= {*KINDS} else FEW_WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            given.logs or Path(folder),
            given.model,
            given.faults,
            seed=given.seed,
            pace=given.pace,
            verbose=True,
            options=options,
            workers=workers,
            kinds=kinds,
        )
    print(report)
    print(
        f"{sum(report.faults.values())} faults, seed {given.seed}, in {report.seconds / 60:.1f} minutes"
    )
    for line in report.outcome.wrong[:5]:
        print("  wrong:", line)


if __name__ == "__main__":
    main()
