"""Workers for fault injection: real processes with a proxy before each and a fault that the test controls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes.faulty_worker import FAULT
from tests.support.processes.processes import Process, Worker, as_worker, ending, launch
from tests.support.processes.proxy import Proxy, proxies
from tests.support.processes.task_count import TASKS


@dataclass(frozen=True)
class Place:
    """The machine of a worker: where it listens, and the command and environment that put a process there."""

    listen: str = "127.0.0.1:0"
    flags: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Team:
    """Workers, usually behind proxies. Workers keep their addresses when they restart."""

    def __init__(
        self, folder: Path, model: str | Path, count: int, places: Sequence[Place] = ()
    ) -> None:
        self.folder = folder
        self.starts = 0
        self.places = places or [Place()] * count
        launched = [self._launch(i, model, self.places[i].listen) for i in range(count)]
        self.workers: list[Worker] = []
        try:
            self.workers = [as_worker(process) for process in launched]
        except BaseException:
            for process in launched:
                process.kill()
            raise
        self.proxies: list[Proxy] = []

    def _launch(self, number: int, model: str | Path, listen: str, data_port: int = 0) -> Process:
        self.starts += 1
        name = f"w{number}"
        place = self.places[number]
        arguments = ["--model", str(model), "--listen", listen, "--name", name, "--no-mdns"]
        arguments += ["--data-port", str(data_port)]
        return launch(
            self.folder,
            f"{name}.{self.starts}",
            "tests.support.processes.faulty_worker",
            [*arguments, *place.flags],
            env={FAULT: str(self._file(number)), TASKS: str(self.folder), **place.env},
            prefix=place.prefix,
        )

    def _file(self, number: int) -> Path:
        return self.folder / f"fault-{number}"

    @property
    def addresses(self) -> list[str]:
        """Addresses of the proxies, or of the workers if there are none."""
        return [listening.address for listening in self.proxies or self.workers]

    def set_fault(self, number: int, fault: str = "") -> None:
        """Set the fault of a worker's engine. An empty string ends the fault."""
        file = self._file(number)
        new = file.with_suffix(".new")
        new.write_text(fault)
        new.replace(file)  # atomic, so the worker never reads half a file

    def pause(self, number: int) -> None:
        """Send SIGSTOP to a worker."""
        os.kill(self.workers[number].pid, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """Send SIGCONT to a worker."""
        os.kill(self.workers[number].pid, signal.SIGCONT)

    def launch_again(self, number: int, model: str | Path) -> Process:
        """Start a new process for an ended worker, at the same address."""
        ended = self.workers[number]
        return self._launch(number, model, ended.address, ended.data_port)

    def restart(self, number: int, model: str | Path) -> None:
        """Kill a worker if it runs, start it again and wait until it is ready."""
        self.workers[number].kill()
        self.workers[number] = as_worker(self.launch_again(number, model))

    def end_faults(self) -> None:
        """End all faults. Workers that ended stay ended."""
        for proxy in self.proxies:
            proxy.thaw()
            proxy.refuse(False)
        for number, worker in enumerate(self.workers):
            self.set_fault(number)
            if worker.running:
                self.resume(number)


@contextmanager
def running_team(
    folder: Path,
    model: str | Path,
    count: int,
    places: Sequence[Place] = (),
    *,
    proxied: bool = True,
) -> Iterator[Team]:
    """Run `count` workers, with their proxies if they are `proxied`."""
    team = Team(folder, model, count, places)
    try:
        targets = team.workers if proxied else []
        with proxies(targets) as team.proxies:
            yield team
    finally:
        for worker in team.workers:
            if worker.running:
                os.kill(worker.pid, signal.SIGCONT)
                worker.popen.terminate()
        for worker in team.workers:
            with ending(worker):
                pass
