"""Random faults under load: processes, networks and machines fail while clients compare answers.

A run first asks every question without faults. It then repeats the questions while faults come in a seeded order, and
compares the answers. `python -m tests.chaos.run --kinds process,network,host,storm,group,ends` makes one study after
the other:

    process, network, host: the next fault comes when every worker is part of the cluster again
    storm, group: a fault comes every few seconds, without a pause to recover; `group` ends members of groups
    ends: every process gets SIGTERM at some moment (`tests.chaos.ends`)

With `--workers 1 --serve mtp=off` every plan is one stage that runs ahead of the coordinator.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.ends import end_processes
from tests.chaos.faults import (
    HOST_KINDS,
    NETWORK_KINDS,
    STUDIES,
    SURVIVOR,
    Fault,
    Faults,
    schedule,
    wait_until,
    why_impossible,
)
from tests.chaos.host import Host, hosts
from tests.chaos.load import QUESTIONS, Answer, Clients, Question, ask, clients
from tests.chaos.network import Network, network
from tests.chaos.report import Report, crashes_of
from tests.support.processes.processes import Coordinator, as_coordinator, ending, launch
from tests.support.processes.resource_use import resource_use
from tests.support.processes.task_count import TASKS
from tests.support.processes.team import Place, Team, running_team

FAULTS = {"process": 80, "network": 70, "host": 50, "storm": 30, "group": 30, "ends": 100}
"""The studies, and the faults of each by default."""

BY_THE_CLOCK = ("storm", "group")

WORKERS = {"process": 4, "storm": 4, "group": 2}
"""Workers of a study. Others have three: two stay while one is lost, so plans nearly always have hops."""

FAILURE_TIMEOUTS = {"process": 2.0}
"""Seconds. Failure timeout of a study, else 4. With less, a busy machine is one more fault."""

CLIENTS = {"storm": 8, "group": 8}
"""Concurrent clients of a study. Others have three."""

LONGER_SECONDS = (0.5, 2.0)
"""Seconds. Shortest and longest time by which a fault exceeds the failure timeout."""

STUCK_SECONDS = 5.0
"""Seconds. Longest additional wait until a blocked engine is noticed. One that no plan uses is never noticed."""

BACK_SECONDS = 40.0
"""Seconds. Longest wait until a repaired worker can serve again."""

ENDED = threading.Event()
"""Set by SIGTERM: the run ends after the present fault, and reports."""

SAMPLES = 10
"""Number of samples of the processes' resource use over a run."""


@dataclass(frozen=True)
class Plan:
    """The study of a run, its faults, and the options of its programs."""

    study: str
    faults: int
    seed: int
    kinds: Sequence[str]
    model: str = "builtin"
    pace: float = 0.0
    """Seconds from fault to fault, at the least."""
    workers: int = 0
    serve: Sequence[str] = ()
    """Further options of `mtp-coord serve`."""
    worker: Sequence[str] = ()
    """Further options of `mtp-worker`."""
    verbose: bool = False

    @property
    def team(self) -> int:
        """Number of workers."""
        return self.workers or WORKERS.get(self.study, 3)

    @property
    def timeout(self) -> float:
        """The failure timeout in seconds."""
        return FAILURE_TIMEOUTS.get(self.study, 4.0)

    @property
    def clients(self) -> int:
        """Number of concurrent clients."""
        return CLIENTS.get(self.study, 3)


@contextmanager
def surroundings(plan: Plan, folder: Path) -> Iterator[tuple[Network | None, list[Host], list[Place]]]:
    """Run a network if a fault needs one, and hosts if a fault needs them. Yield both, and the place of each process.

    The last place is the coordinator's.
    """
    with ExitStack() as stack:
        net = found = None
        if {*plan.kinds} & {*NETWORK_KINDS}:
            net = stack.enter_context(network(plan.team, plan.seed))
        if {*plan.kinds} & {*HOST_KINDS}:
            found = stack.enter_context(hosts(folder, plan.team + 1))
        insecure = () if net is None else ("--insecure",)
        places = []
        for number in range(plan.team + 1):
            place = found[number].place if found else Place()
            if number == plan.team:
                places.append(Place(flags=insecure, prefix=place.prefix, env=place.env))
                continue
            host = place.host if net is None else net.address(number)
            prefix = () if net is None else net.prefix(number)
            env = {"MTP_STATE_DIR": str(folder / f"worker-{number}"), **place.env}
            places.append(Place(host, (*insecure, *plan.worker), (*prefix, *place.prefix), env))
        yield net, found or [], places


@contextmanager
def coordinating(plan: Plan, folder: Path, team: Team, place: Place) -> Iterator[Coordinator]:
    """Run a coordinator over the workers of `team`. Its layers compute in fp32, unless the plan says otherwise."""
    flags = [flag for address in team.addresses for flag in ("--worker", address)]
    flags += ["--model", plan.model, "--dtype", "float32", "--port", "0", "--no-mdns"]
    flags += ["--failure-timeout", str(plan.timeout)]
    flags += ["--nodes", str(plan.team)] if plan.study in BY_THE_CLOCK else []
    flags += ["--parallel", "tensor"] if plan.study == "group" else []
    env = {TASKS: str(folder), "MTP_STATE_DIR": str(folder / "state"), **place.env}
    own = "tests.support.processes.no_back_off_coordinator"
    module = "coordinator.cli" if plan.study in BY_THE_CLOCK else own
    launched = launch(
        folder,
        "coordinator",
        module,
        ["serve", *flags, *place.flags, *plan.serve],
        env=env,
        prefix=place.prefix,
    )
    with ending(launched) as process:
        yield as_coordinator(process)


class Run:
    """One run: its processes, its faults and its report."""

    def __init__(self, plan: Plan, folder: Path, team: Team, coordinator: Coordinator, faults: Faults) -> None:
        self.plan, self.folder, self.team = plan, folder, team
        self.coordinator, self.faults = coordinator, faults
        self.report = Report()
        self.times: list[tuple[str, float, float]] = []
        """The kind, the start and the end of each fault with its repair, in seconds since 1970."""

    def status(self) -> dict[str, Any]:
        """Return the coordinator's /status reply."""
        found: dict[str, Any] = httpx.get(f"{self.coordinator.url}/status", timeout=60).json()
        return found

    def all_healthy(self) -> bool:
        """Return True if every worker can serve and a plan serves."""
        found = self.status()
        well = [n for n in found["nodes"] if n["address"] and n["health"] in ("ready", "idle")]
        return found["ready"] and len(well) == len(self.team.workers)

    def spans_workers(self) -> bool:
        """Return True if a plan serves over two workers, or over all if there are fewer."""
        found = self.status()
        used = [node for node in found["nodes"] if node["address"] and node["span"]]
        return found["ready"] and len(used) >= min(2, len(self.team.workers))

    def complain(self, about: str) -> None:
        """Record that the cluster did not recover, with the health of every node."""
        nodes = (f"{n['name']} {n['health']} {n['detail']}" for n in self.status()["nodes"])
        self.report.not_back.append(f"{about}: {'; '.join(nodes)}")

    def sample(self) -> None:
        """Record the resource use of the coordinator and of the surviving worker."""
        survivor = self.team.workers[SURVIVOR]
        for name, process in (("coordinator", self.coordinator), ("worker", survivor)):
            self.report.resource_use.setdefault(name, []).append(resource_use(process.pid, self.folder))

    def inject_by_the_clock(self, fault: Fault) -> None:
        """Inject `fault` and repair it. Nothing waits for the cluster."""
        self.faults.inject(fault)
        time.sleep(fault.seconds if fault.kind in ("stop", "freeze", "stuck") else 0.0)
        self.faults.repair(fault)

    def inject_and_recover(self, fault: Fault, asking: Clients) -> None:
        """Inject `fault`, repair it, and wait until every worker is part of the cluster again."""
        if not wait_until(self.spans_workers, BACK_SECONDS):
            self.complain(f"before {fault}")
        epoch = self.status()["epoch"]
        self.faults.inject(fault)
        time.sleep(fault.seconds)
        if fault.kind == "stuck":  # a frame of a new size has a longer deadline
            wait_until(lambda: self.status()["epoch"] != epoch, STUCK_SECONDS)
        self.faults.repair(fault)
        if not wait_until(self.all_healthy, BACK_SECONDS):
            self.complain(f"{fault}")
        repaired = time.time()
        # On a busy machine the next fault would otherwise end a plan that has not computed anything.
        if not wait_until(lambda: asking.latest > repaired, BACK_SECONDS):
            self.complain(f"{fault}: no client received anything")

    def go(self, due: Sequence[Fault], asking: Clients) -> None:
        """Inject the faults `due` while the clients `asking` run."""
        time.sleep(1.0)  # every client has sent its first request
        for number, fault in enumerate(due):
            if ENDED.is_set():
                break
            started = time.time()
            if self.plan.study in BY_THE_CLOCK:
                self.inject_by_the_clock(fault)
            else:
                if number % max(1, len(due) // SAMPLES) == 0:
                    self.sample()
                self.inject_and_recover(fault, asking)
            if not self.coordinator.running:
                text = self.coordinator.text()[-2000:]
                raise RuntimeError(f"the coordinator ended during {fault}: {text}")
            time.sleep(max(0.0, self.plan.pace - (time.time() - started)))
            self.times.append((fault.kind, started, time.time()))
            if self.plan.verbose:
                o = asking.outcome
                done = f"{number + 1}/{len(due)} {fault.kind} w{fault.victim}:"
                found = f"{o.finished} finished {len(o.wrong)} wrong"
                print(time.strftime("%T"), done, found, file=sys.stderr, flush=True)

    def complete_report(self, asking: Clients) -> Report:
        """Return the report, with the findings of the clients and of the logs."""
        report = self.report
        report.outcome = asking.outcome
        report.plans = len(self.coordinator.records("cluster: serving"))
        for kind, start, end in self.times:
            report.faults[kind] += 1
            report.silences.setdefault(kind, []).append(asking.outcome.silence(start, end))
        return report


def undisturbed(plan: Plan, url: str) -> dict[Question, Answer]:
    """Return the answers without faults, with as many concurrent clients as the run has."""
    name = Path(plan.model).name
    with ThreadPoolExecutor(plan.clients) as pool:
        answers = pool.map(lambda question: ask(url, name, question), QUESTIONS)
        return dict(zip(QUESTIONS, answers, strict=True))


def run(plan: Plan, folder: Path) -> Report:
    """Carry out `plan` under load. Return the report. Equal seeds give the same faults in the same order."""
    started = time.monotonic()
    lengths = (plan.timeout + LONGER_SECONDS[0], plan.timeout + LONGER_SECONDS[1])
    due = schedule(plan.seed, plan.faults, plan.team, lengths, plan.kinds)
    proxied = {*plan.kinds}.isdisjoint(NETWORK_KINDS) and plan.study != "group"
    with (
        surroundings(plan, folder) as (net, limited, places),
        running_team(folder, plan.model, plan.team, places[:-1], proxied=proxied) as team,
        coordinating(plan, folder, team, places[-1]) as coordinator,
    ):
        wanted = undisturbed(plan, coordinator.url)
        address = coordinator.url.removeprefix("http://")
        faults = Faults(team, plan.model, coordinator.pid, address=address, network=net, hosts=limited)
        doing = Run(plan, folder, team, coordinator, faults)
        name = Path(plan.model).name
        with clients(coordinator.url, name, wanted, plan.clients) as asking:
            doing.go(due, asking)
        report = doing.complete_report(asking)
    report.crashes = crashes_of(folder)
    report.seconds = time.monotonic() - started
    return report


def permitted(kinds: Sequence[str]) -> list[str]:
    """Return the `kinds` that this system permits. Print the others."""
    reasons = {kind: why_impossible(kind) for kind in kinds}
    for kind, reason in reasons.items():
        if reason is not None:
            print(f"left out: {kind}: {reason}", flush=True)
    return [kind for kind, reason in reasons.items() if reason is None]


def main() -> None:
    """Run studies from the command line. Exit with status 1 if an answer was wrong or a process crashed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--kinds", default=",".join(FAULTS), help="studies, with commas between")
    parser.add_argument("--faults", type=int, help="of each study; by default a night's share")
    parser.add_argument("--only", nargs="+", default=[], help="kinds of faults of one study")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, help="seconds from fault to fault; 6, by the clock 10")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--serve", nargs="+", default=[], help="options of serve, such as mtp=off")
    parser.add_argument("--worker", nargs="+", default=[], help="such as prefix-disk=2GB")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="an empty folder for the logs of all processes")
    given = parser.parse_args()
    if unknown := {*given.kinds.split(",")} - FAULTS.keys():
        parser.error(f"unknown study: {', '.join(unknown)}. Use {', '.join(FAULTS)}.")
    signal.signal(signal.SIGTERM, lambda *_: ENDED.set())
    bad = False
    for study in given.kinds.split(","):
        count = given.faults or FAULTS[study]
        if study == "ends":
            crashes = end_processes(count, given.seed)
            print(f"{count} ends, {len(crashes)} crashes or slow starts")
            bad = bad or bool(crashes)
            continue
        kinds = permitted([k for k in STUDIES[study] if k in (given.only or STUDIES[study])])
        if not kinds:
            continue
        with tempfile.TemporaryDirectory() as made:
            plan = Plan(
                study,
                count,
                given.seed,
                kinds,
                given.model,
                given.pace or (10.0 if study in BY_THE_CLOCK else 6.0),
                given.workers,
                [word for option in given.serve for word in f"--{option}".split("=")],
                [word for option in given.worker for word in f"--{option}".split("=")],
                verbose=True,
            )
            report = run(plan, given.logs or Path(made))
        print(f"{study}, seed {given.seed}\n{report}", flush=True)
        # A process of a group that is stopped in mid-frame may end with a traceback, which the report shows.
        crashed = report.crashes and study not in BY_THE_CLOCK
        bad = bad or bool(report.outcome.wrong or report.outcome.hung or crashed)
    sys.exit(bad)


if __name__ == "__main__":
    main()
