"""Real `mtp-worker` and `mtp-coord serve` processes on ports the system chooses, and what they say in their logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 100.0
"""Longest wait for a process to say that it is ready: importing MLX takes seconds where many share a core."""

STOP_SECONDS = 40.0
"""Longest wait after SIGTERM: a worker drains for up to 20."""

LOG_FORMAT = ("--log-format", "json")

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"
"""transformers imports torch where it is installed, as for our parity tests, and takes seconds; our users have none."""


@dataclass
class Process:
    """One of our programs, running. Its log is JSON, a record a line."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def records(self, message: str | None = None) -> list[dict[str, Any]]:
        """What it has logged so far: all of it, or the records that say `message`."""
        found = [record for line in self.text().splitlines() if (record := _record(line))]
        return [r for r in found if message is None or r.get("message") == message]

    def wait_for(
        self, message: str, timeout: float = START_SECONDS, count: int = 1
    ) -> dict[str, Any]:
        """The `count`-th record that says `message`. Raises AssertionError when the process ends or says nothing."""
        deadline = time.monotonic() + timeout
        while True:
            running = self.running  # before reading: what a process says last is read after its end
            found = self.records(message)
            if len(found) >= count:
                return found[count - 1]
            assert running, f"{self.name} ended with {self.popen.returncode}: {self.text()[-2000:]}"
            assert time.monotonic() < deadline, (
                f"{self.name} never said {message!r}: {self.text()[-2000:]}"
            )
            time.sleep(0.05)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """Its exit status, once it has ended by itself."""
        return self.popen.wait(timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """SIGTERM, and its exit status. Raises subprocess.TimeoutExpired when it does not leave in time."""
        if self.running:
            self.popen.terminate()
        return self.popen.wait(timeout)

    def kill(self) -> None:
        """SIGKILL; a stopped process dies of it too."""
        if self.running:
            self.popen.kill()
        self.popen.wait(STOP_SECONDS)


@dataclass
class Worker(Process):
    """`address` is where it listens."""

    address: str = ""


@dataclass
class Coordinator(Process):
    """`url` is the root of its HTTP server; the API is under `/v1`."""

    url: str = ""


def launch(
    folder: Path,
    name: str,
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    cores: Sequence[int] = (),
    prefix: Sequence[str] = (),
) -> Process:
    """Start `module`'s `main` with these arguments. The caller stops it.

    `env` is added to this process's. `cores` pins it to these CPUs, where the system can. `prefix` is a command that
    becomes the one after it, as `without_folder` makes one.
    """
    log = folder / f"{name}.log"
    start = f"{WITHOUT_TORCH}; from {module} import main; main()"
    command = [*prefix, sys.executable, "-c", start, *arguments, *LOG_FORMAT]
    if cores:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    inherited = {name: value for name, value in os.environ.items() if name != "MTP_API_KEY"}
    with log.open("wb") as stream:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env={**inherited, **(env or {})},
        )
    return Process(name, popen, log)


def without_folder(hidden: Path) -> tuple[str, ...]:
    """For `prefix`: the process finds `hidden` empty, as on a machine that lacks the files. () where that cannot be."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    mount = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    prefix = (unshare, "--map-root-user", "--mount", "sh", "-c", mount, str(hidden))
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=60)
    return () if tried.returncode else prefix


def launch_worker(folder: Path, name: str, *arguments: str, **how: Any) -> Process:
    """An `mtp-worker` that no one waits for; without mDNS, on any free port unless `arguments` name one."""
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    return launch(
        folder, name, "worker.cli", [*listen, "--name", name, "--no-mdns", *arguments], **how
    )


def as_worker(process: Process, timeout: float = START_SECONDS) -> Worker:
    """A launched worker, once it is ready."""
    address = str(process.wait_for("worker ready", timeout)["address"])
    return Worker(process.name, process.popen, process.log, address)


def launch_coordinator(
    folder: Path, *arguments: str, name: str = "coordinator", **how: Any
) -> Process:
    """An `mtp-coord serve` that no one waits for; without mDNS, on any free port unless `arguments` name one."""
    port = () if "--port" in arguments else ("--port", "0")
    return launch(folder, name, "coordinator.cli", ["serve", *port, "--no-mdns", *arguments], **how)


def as_coordinator(process: Process, timeout: float = START_SECONDS) -> Coordinator:
    """A launched coordinator, once its first plan serves."""
    url = str(process.wait_for("serving", timeout)["url"]).removesuffix("/v1")
    return Coordinator(process.name, process.popen, process.log, url)


@contextmanager
def ending(process: Process) -> Iterator[Process]:
    """Whatever happens inside, the process is gone afterwards."""
    try:
        yield process
    finally:
        try:
            process.stop()
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass
class Cluster:
    """Workers in the order they were started, and their coordinator."""

    workers: list[Worker]
    coordinator: Coordinator

    @property
    def url(self) -> str:
        return self.coordinator.url


@contextmanager
def running_workers(
    folder: Path, model: str | Path, count: int, *arguments: str, **how: Any
) -> Iterator[list[Worker]]:
    """So many workers over the checkpoint, started side by side, ready; stopped side by side at the end."""
    with ExitStack() as stack:
        launched = [
            launch_worker(folder, f"w{i}", "--model", str(model), *arguments, **how)
            for i in range(count)
        ]
        for process in launched:
            stack.enter_context(ending(process))
        yield [as_worker(process) for process in launched]
        for process in launched:  # all hear of it before the first one is waited for
            if process.running:
                process.popen.terminate()


@contextmanager
def serving(
    folder: Path,
    model: str | Path,
    addresses: Sequence[str],
    *arguments: str,
    name: str = "coordinator",
    **how: Any,
) -> Iterator[Coordinator]:
    """A coordinator over the workers at these addresses, serving; with none of them it serves alone."""
    flags = [flag for address in addresses for flag in ("--worker", address)]
    # It serves as soon as all of them are there, be the machine never so busy.
    flags += ["--wait", str(START_SECONDS)] if addresses else ["--single-node"]
    process = launch_coordinator(
        folder, "--model", str(model), *flags, *arguments, name=name, **how
    )
    with ending(process):
        yield as_coordinator(process)


@contextmanager
def running_cluster(
    folder: Path,
    model: str | Path,
    count: int,
    *arguments: str,
    worker_flags: Sequence[str] = (),
    **how: Any,
) -> Iterator[Cluster]:
    """Workers and a coordinator over them; `arguments` are the coordinator's."""
    with (
        running_workers(folder, model, count, *worker_flags) as workers,
        serving(folder, model, [w.address for w in workers], *arguments, **how) as coordinator,
    ):
        yield Cluster(workers, coordinator)


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}  # half a line, or a traceback
    return record if isinstance(record, dict) else {}
