"""A program as a service of its user: an agent of launchd, or a user's unit of systemd.

The flags are in a file of the state directory, so the definition names the program and this directory alone.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from proto.errors import UsageError
from proto.state_dir import state_dir as directory_of
from proto.terminal.logs import LOG_FILE
from proto.terminal.options import StateOption

COMMAND_SECONDS = 60.0
"""Seconds. Bound of a call of launchctl or systemctl. Stopping a program takes up to 30."""

POLL_SECONDS = 0.3
"""Seconds between two looks for new lines of the log."""

LAST_LINES = 40
"""Lines of the log that are shown before new ones."""


@dataclass(frozen=True)
class Service:
    """The service of `program`, such as `mtp-worker`, with the `arguments` before its flags."""

    program: str
    arguments: tuple[str, ...]
    state: Path

    @property
    def log_file(self) -> Path:
        """The file of the log, which rotates."""
        return self.state / "logs" / f"{self.program}.log"

    @property
    def command(self) -> list[str]:
        """The command of the service. Raises UsageError if the program cannot be found."""
        found = shutil.which(sys.argv[0]) or shutil.which(self.program)
        if found is None:
            raise UsageError(f"{self.program} is not on PATH. Install it with uv tool install")
        places = ["--state-dir", str(self.state), LOG_FILE, str(self.log_file)]
        return [os.path.abspath(found), *self.arguments, *places]

    def install(self) -> Path:
        """Write the definition, start the service now and at every login, and return the file. Replaces an earlier one.

        Raises UsageError if the system refuses it.
        """
        self.log_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except UsageError as error:
            self.file.unlink(missing_ok=True)
            raise UsageError(f"{error}. Nothing was installed; {self.program} runs without a service too") from error
        return self.file

    def _start(self) -> None:
        if sys.platform == "darwin":
            if self.file.exists():
                self._run("bootout", self._target, check=False)
            self.file.write_bytes(plistlib.dumps(self._plist()))
            self._run("bootstrap", self._domain, str(self.file))
        else:
            self.file.write_text(self._unit())
            self._run("daemon-reload")
            self._run("enable", "--quiet", self._target)
            self._run("restart", self._target)

    def uninstall(self) -> None:
        """Stop the service and remove its definition. Raises UsageError if there is none."""
        self._check_installed()
        if sys.platform == "darwin":
            self._run("bootout", self._target, check=False)
        else:
            self._run("disable", "--quiet", "--now", self._target, check=False)
        self.file.unlink()

    def status(self) -> str:
        """Return the state of the service for people. Raises UsageError if it is not installed."""
        self._check_installed()
        text = self.file.read_text()
        program = self.command[0]
        if program not in text:
            return f"installed for a program that is not this one ({program}). Run service install again"
        verb = "print" if sys.platform == "darwin" else "status"
        extra = () if sys.platform == "darwin" else ("--no-pager", "--lines=0")
        return self._run(verb, *extra, self._target, check=False)

    def follow_log(self, *, once: bool = False) -> None:
        """Print the last lines of the log, and new ones until Ctrl-C. Raises UsageError without a log."""
        if not self.log_file.exists():
            raise UsageError(f"{self.log_file}: no log yet. Is the service installed?")
        lines = self.log_file.read_text(errors="replace").splitlines()
        sys.stdout.write("\n".join([*lines[-LAST_LINES:], ""]))
        while not once:
            with self.log_file.open(errors="replace") as stream:
                stream.seek(0, os.SEEK_END)
                at = os.fstat(stream.fileno()).st_ino
                while self.log_file.exists() and self.log_file.stat().st_ino == at:
                    sys.stdout.write(stream.read())
                    sys.stdout.flush()
                    time.sleep(POLL_SECONDS)

    # ---- the definitions

    @property
    def file(self) -> Path:
        """The definition of the service."""
        home = Path.home()
        if sys.platform == "darwin":
            return home / "Library" / "LaunchAgents" / f"{self._label}.plist"
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return config / "systemd" / "user" / f"{self.program}.service"

    @property
    def _label(self) -> str:
        return f"mtp-cluster.{self.program}"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        mac = sys.platform == "darwin"
        return f"{self._domain}/{self._label}" if mac else f"{self.program}.service"

    def _plist(self) -> dict[str, object]:
        """Return the definition for launchd. The program writes its own log; what it cannot log goes beside it."""
        errors = str(self.log_file.with_suffix(".err"))
        return {
            "Label": self._label,
            "ProgramArguments": self.command,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": 30,
            # macOS slows other background work down in favour of programs on the screen.
            "ProcessType": "Interactive",
            "StandardOutPath": errors,
            "StandardErrorPath": errors,
        }

    def _unit(self) -> str:
        """Return the definition for systemd. Status 2 is a wrong flag, with which no start succeeds."""
        command = " ".join(f'"{_escaped(part)}"' for part in self.command)
        return (
            f"[Unit]\nDescription={self.program} of mtp-cluster\nAfter=network-online.target\n\n"
            f"[Service]\nType=exec\nExecStart={command}\nRestart=on-failure\nRestartSec=2\n"
            "RestartPreventExitStatus=2\nTimeoutStopSec=30\nLimitNOFILE=65536\n\n"
            "[Install]\nWantedBy=default.target\n"
        )

    def _check_installed(self) -> None:
        if not self.file.exists():
            raise UsageError(f"no service is installed: {self.file} does not exist")

    def _run(self, *arguments: str, check: bool = True) -> str:
        """Run launchctl or systemctl, and return its output. Raises UsageError if it fails and `check` is set."""
        mac = sys.platform == "darwin"
        command = ["launchctl", *arguments] if mac else ["systemctl", "--user", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{command[0]} does not work here: {error}") from error
        said = (done.stdout + done.stderr).strip()
        if check and done.returncode:
            raise UsageError(f"{' '.join(command)}: {said or f'status {done.returncode}'}")
        return said


def _escaped(text: str) -> str:
    """Return `text` for a quoted argument of ExecStart, in which systemd expands % and $."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


def service_app(what: str, make: Callable[[Path], Service]) -> typer.Typer:
    """Return the commands `uninstall`, `status` and `logs` of the service that `make` returns for a state directory."""
    app = typer.Typer(name="service", no_args_is_help=True, add_completion=False, help=what)

    def of(given: Path | None) -> Service:
        return make(directory_of(given).absolute())

    @app.command()
    def uninstall(state_dir: StateOption = None) -> None:
        """Stop the service and remove it. The file of its flags stays."""
        of(state_dir).uninstall()
        typer.echo("removed")

    @app.command()
    def status(state_dir: StateOption = None) -> None:
        """Show whether the service runs."""
        typer.echo(of(state_dir).status())

    @app.command()
    def logs(state_dir: StateOption = None) -> None:
        """Show the log of the service, and on a terminal what comes, until Ctrl-C."""
        of(state_dir).follow_log(once=not sys.stdout.isatty())

    return app
