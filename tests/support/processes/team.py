"""Workers for fault injection: real processes with a proxy before each and a fault that the test controls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes.faulty_worker import FAULT
from tests.support.processes.processes import SHARED_MEMORY, Process, Worker, as_worker, ending, launch
from tests.support.processes.proxy import Proxy, proxies
from tests.support.processes.reserved_port import reserved_port
from tests.support.processes.task_count import TASKS


@dataclass(frozen=True)
class Place:
    """The machine of a worker: its address, and the command and environment that put a process there."""

    host: str = "127.0.0.1"
    flags: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Team:
    """Workers, usually behind proxies. Workers keep their addresses when they restart."""

    def __init__(
        self,
        folder: Path,
        model: str | Path,
        places: Sequence[Place],
        ports: Sequence[tuple[int, int]],
    ) -> None:
        self.folder = folder
        self.starts = 0
        self.places = places
        self.ports = ports
        launched = [self.launch(number, model) for number in range(len(places))]
        self.workers: list[Worker] = []
        try:
            self.workers = [as_worker(process) for process in launched]
        except BaseException:
            for process in launched:
                process.kill()
            raise
        self.proxies: list[Proxy] = []

    def launch(self, number: int, model: str | Path) -> Process:
        """Start a process for a worker, always at the same address."""
        self.starts += 1
        name = f"w{number}"
        place = self.places[number]
        port, data_port = self.ports[number]
        listen = f"{place.host}:{port}"
        arguments = ["--model", str(model), "--listen", listen, "--name", name, "--no-mdns"]
        arguments += ["--data-port", str(data_port), *SHARED_MEMORY]
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

    def restart(self, number: int, model: str | Path) -> None:
        """Kill a worker if it runs, start it again and wait until it is ready."""
        self.workers[number].kill()
        self.workers[number] = as_worker(self.launch(number, model))

    def end_faults(self) -> None:
        """End all faults. Workers that ended stay ended."""
        for proxy in self.proxies:
            proxy.thaw()
            proxy.refuse(False)
        for number, worker in enumerate(self.workers):
            self.set_fault(number)
            if worker.running:
                self.resume(number)

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            if worker.running:
                os.kill(worker.pid, signal.SIGCONT)
                worker.popen.terminate()
        for worker in self.workers:
            with ending(worker):
                pass


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
    places = places or [Place()] * count
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(2 * len(places))]
        team = Team(folder, model, places, list(zip(ports[::2], ports[1::2], strict=True)))
        stack.callback(team.end)
        targets = team.workers if proxied else []
        team.proxies = stack.enter_context(proxies(targets))
        yield team
