"""Real `mtp-worker` and `mtp-coord serve` processes on ports that the system chooses, and their logs."""

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

from proto.state_dir import STATE_DIR
from tests.support.processes.forked import Forked, Started, can_fork

START_SECONDS = 100.0
"""Seconds. Longest wait until a process is ready. Importing MLX takes seconds where processes share a core."""

STOP_SECONDS = 40.0
"""Seconds. Longest wait after SIGTERM. A worker drains for up to 20 seconds."""

SHARED_MEMORY = ("--memory-limit", "16GB")
"""Flags with which several workers of one state directory run on one machine."""

LOG_FORMAT = ("--log-format", "json")

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"
"""Prefix of every program. transformers imports torch if it is installed, which takes seconds; users have no torch."""


KEEP_OPEN_FILES = "from proto.terminal.console import keep_open_file_limit; keep_open_file_limit()"
"""Further prefix of every program, because modules for tests import mlx-lm before their programs start."""


@dataclass
class Process:
    """One of this project's programs, running. Its log has one JSON record a line."""

    name: str
    popen: Started
    log: Path

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    @property
    def running(self) -> bool:
        """True until the process ends."""
        return self.popen.poll() is None

    def text(self) -> str:
        """Return the whole log so far."""
        return self.log.read_text(errors="replace")

    def records(self, message: str | None = None) -> list[dict[str, Any]]:
        """Return the log records so far, or those whose message is `message`."""
        found = [record for line in self.text().splitlines() if (record := _record(line))]
        return [r for r in found if message is None or r.get("message") == message]

    def wait_for(self, message: str, timeout: float = START_SECONDS, count: int = 1) -> dict[str, Any]:
        """Return the `count`-th record whose message is `message`.

        Raises AssertionError if the process ends or the record does not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            running = self.running  # read before the log, which may get its last record just before the process ends
            found = self.records(message)
            if len(found) >= count:
                return found[count - 1]
            assert running, f"{self.name} ended with {self.popen.returncode}: {self.text()[-2000:]}"
            assert time.monotonic() < deadline, f"{self.name} never said {message!r}: {self.text()[-2000:]}"
            time.sleep(0.05)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """Wait until the process ends by itself. Return its exit status."""
        return self.popen.wait(timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Send SIGTERM and return the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.running:
            self.popen.terminate()
        return self.popen.wait(timeout)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        if self.running:
            self.popen.kill()
        self.popen.wait(STOP_SECONDS)


@dataclass
class Worker(Process):
    """A worker process. `address` is where it listens for calls, and `data_port` for data connections."""

    address: str = ""
    data_port: int = 0


@dataclass
class Coordinator(Process):
    """A coordinator process. `url` is the root of its HTTP server; the API is under `/v1`."""

    url: str = ""


def launch(
    folder: Path,
    name: str,
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Process:
    """Start `main` of `module` with these arguments. The caller stops the process.

    It is forked if it can be. `env` is added to this process's environment. `prefix` is a command that executes the one
    after it, such as the result of `without_folder`.
    """
    log = folder / f"{name}.log"
    start = f"{WITHOUT_TORCH}; {KEEP_OPEN_FILES}; from {module} import main; main()"
    command = [*prefix, sys.executable, "-c", start, *arguments, *LOG_FORMAT]
    inherited = {name: value for name, value in os.environ.items() if name != "MTP_API_KEY"}
    whole = {**inherited, **(env or {})}
    with log.open("wb") as stream:
        if not prefix and can_fork(env or {}):
            return Process(name, Forked(start, [*arguments, *LOG_FORMAT], whole, log), log)
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stream, env=whole)
    return Process(name, popen, log)


def without_folder(hidden: Path) -> tuple[str, ...]:
    """Return a `prefix` for a process that finds `hidden` empty, or () if this system cannot do that."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    mount = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    prefix = (unshare, "--map-root-user", "--mount", "sh", "-c", mount, str(hidden))
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=60)
    return () if tried.returncode else prefix


def launch_worker(folder: Path, name: str, *arguments: str, **how: Any) -> Process:
    """Start an `mtp-worker` and do not wait for it. It has no mDNS and a free port unless `arguments` name one.

    It shares the memory of this machine with other workers.
    """
    limit = () if "--memory-limit" in arguments else SHARED_MEMORY
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    return launch(folder, name, "worker.cli", [*listen, *limit, "--name", name, "--no-mdns", *arguments], **how)


def as_worker(process: Process, timeout: float = START_SECONDS) -> Worker:
    """Wait until a launched worker is ready, and return it."""
    ready = process.wait_for("worker ready", timeout)
    data_port = int(str(ready["data_port"]))
    return Worker(process.name, process.popen, process.log, str(ready["address"]), data_port)


def launch_coordinator(folder: Path, *arguments: str, name: str = "coordinator", **how: Any) -> Process:
    """Start an `mtp-coord serve` and do not wait. It has no mDNS and a free port unless `arguments` name one.

    Its state directory is its own, because a second coordinator in the same one refuses to start.
    """
    port = () if "--port" in arguments else ("--port", "0")
    how["env"] = {STATE_DIR: str(folder / f"{name}-state"), **how.get("env", {})}
    return launch(folder, name, "coordinator.cli", ["serve", *port, "--no-mdns", *arguments], **how)


def as_coordinator(process: Process) -> Coordinator:
    """Wait until the first plan of a launched coordinator serves, and return the coordinator."""
    url = str(process.wait_for("serving", START_SECONDS)["url"]).removesuffix("/v1")
    return Coordinator(process.name, process.popen, process.log, url)


@contextmanager
def ending(process: Process) -> Iterator[Process]:
    """Ensure that the process has ended when the block exits."""
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
        """Root of the coordinator's HTTP server."""
        return self.coordinator.url


@contextmanager
def running_workers(folder: Path, model: str | Path, count: int, *arguments: str, **how: Any) -> Iterator[list[Worker]]:
    """Run `count` workers over the checkpoint. They start and stop in parallel."""
    with ExitStack() as stack:
        launched = [launch_worker(folder, f"w{i}", "--model", str(model), *arguments, **how) for i in range(count)]
        for process in launched:
            stack.enter_context(ending(process))
        yield [as_worker(process) for process in launched]
        for process in launched:  # every worker gets the signal before the first wait
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
    """Run a coordinator over the workers at these addresses until it serves. Without workers it serves alone."""
    flags = [flag for address in addresses for flag in ("--worker", address)]
    # The coordinator serves as soon as all workers are connected, however slow the machine is.
    flags += ["--wait", str(START_SECONDS)] if addresses else ["--single-node"]
    process = launch_coordinator(folder, "--model", str(model), *flags, *arguments, name=name, **how)
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
    """Run workers and a coordinator over them. `arguments` are the coordinator's."""
    with (
        running_workers(folder, model, count, *worker_flags) as workers,
        serving(folder, model, [w.address for w in workers], *arguments, **how) as coordinator,
    ):
        yield Cluster(workers, coordinator)


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}  # an incomplete line, or a traceback
    return record if isinstance(record, dict) else {}
