"""Programs that a process with all imports forks, so that each starts in tenths of a second.

Until it has imported MLX and mlx-lm, `mtp-worker` uses 1.5 seconds of a core and `mtp-coord` 2.2, which was most of the
time of tests with whole programs. A forked program is a process of its own in all other ways.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

OWN = "MTP_"
"""Prefix of this project's environment variables. Libraries read theirs while they are imported."""


def can_fork(env: Mapping[str, str]) -> bool:
    """Return True if a program with `env` added to its environment can be forked."""
    return sys.platform == "linux" and all(name.startswith(OWN) for name in env)


class Forked:
    """A forked program."""

    def __init__(self, start: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Run the statements `start` as a program with `arguments` and the environment `env`. `log` gets stderr."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.processes.imports"])
        self._process = context.Process(target=_run, args=(start, list(arguments), dict(env), str(log), os.getcwd()))
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None, "it has started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server of forks knows of an end before `poll`
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


Started = subprocess.Popen[bytes] | Forked
"""A program that runs."""


def _run(start: str, arguments: list[str], env: dict[str, str], log: str, folder: str) -> None:
    """Become the program. Runs in the forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    sys.argv = ["-c", *arguments]
    try:
        exec(start, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # a fork ends without them
