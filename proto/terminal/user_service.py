"""A program as a service of its user: an agent of launchd, or a user's unit of systemd.

The flags are in a file of the state directory, so the definition names the program and this directory alone.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import typer

from proto.errors import UsageError
from proto.state_dir import replace_file
from proto.state_dir import state_dir as directory_of
from proto.terminal import mac_app
from proto.terminal.logs import LOG_FILE
from proto.terminal.options import StateOption

COMMAND_SECONDS = 60.0
"""Seconds. Bound of a call of launchctl or systemctl. Stopping a program takes up to 30."""

END_SECONDS = 40.0
"""Seconds. Longest wait for the end of an earlier service, which launchd kills 30 s after it was asked to end."""

LABEL_IN_USE = (5, 37)
"""Statuses of `launchctl bootstrap` while an earlier service of the label ends: EIO, and EALREADY on macOS."""

POLL_SECONDS = 0.3
"""Seconds between two attempts to load a definition, and between two looks for new lines of the log."""

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

    def install(self, flags: AbstractContextManager[None]) -> Path:
        """Start the service now and at every login with the written `flags`, and return the file of its definition.

        Replaces an earlier service, which is put back if this one cannot start. Raises UsageError then.
        """
        self.log_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = self.command
        launcher = mac_app.install() if sys.platform == "darwin" else []
        definition, changed = self._definition([*launcher, *command]), False
        before = self.file.read_bytes() if self.file.exists() else None
        try:
            with flags:  # those of before are back when the earlier service starts again
                self._write(definition)
                changed = True
                self._start(earlier=before is not None)
        except BaseException as error:
            kept = self._put_back(before) if changed else "Nothing was changed"
            if not isinstance(error, UsageError):
                raise
            raise UsageError(f"{error}. {kept}; {self.program} runs without a service too") from error
        return self.file

    def _write(self, definition: bytes) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file.resolve(), definition, 0o600)  # atomic; a link stays one
        except OSError as error:
            raise UsageError(f"{self.file}: cannot be written: {error.strerror}") from error

    def _start(self, *, earlier: bool) -> None:
        if sys.platform == "darwin":
            if earlier:
                self._run("bootout", self._target, check=False)
            self._bootstrap()
        else:
            self._run("daemon-reload")
            self._run("enable", "--quiet", self._target)
            self._run("restart", self._target)

    def _bootstrap(self) -> None:
        """Load the definition. launchd refuses it until the earlier service of this label has ended."""
        deadline = time.monotonic() + END_SECONDS
        while (done := self._call("bootstrap", self._domain, str(self.file))).returncode:
            if done.returncode not in LABEL_IN_USE or time.monotonic() > deadline:
                raise _failure(done)
            time.sleep(POLL_SECONDS)

    def _put_back(self, before: bytes | None) -> str:
        """Start the service with the definition `before`, or remove a failed one. Return the result for people."""
        if before is None:
            with contextlib.suppress(UsageError):
                self._stop()
            self._remove()
            return "Nothing was installed"
        try:
            self._write(before)
            self._start(earlier=True)
        except UsageError as error:
            return f"The earlier service does not start again: {error}"
        return "The earlier service runs again"

    def _stop(self) -> None:
        if sys.platform == "darwin":
            self._run("bootout", self._target, check=False)
        else:
            self._run("disable", "--quiet", "--now", self._target, check=False)

    def uninstall(self) -> None:
        """Stop the service and remove its definition. Raises UsageError if there is none."""
        self._check_installed()
        self._stop()
        self._remove()

    def _remove(self) -> None:
        """Remove the definition, and the app of the last service of this user."""
        self.file.unlink(missing_ok=True)
        if sys.platform == "darwin" and not any(self.file.parent.glob("mtp-cluster.*.plist")):
            shutil.rmtree(mac_app.installed_app(), ignore_errors=True)

    def status(self) -> str:
        """Return the state of the service for people. Raises UsageError if it is not installed."""
        self._check_installed()
        program = self.command[0]
        if self._installed_program() != program:
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

    def _definition(self, command: list[str]) -> bytes:
        return plistlib.dumps(self._plist(command)) if sys.platform == "darwin" else self._unit(command).encode()

    def _installed_program(self) -> str:
        """Return the program of the definition, empty for a definition that cannot be read."""
        content = self.file.read_bytes()
        if sys.platform == "darwin":
            with contextlib.suppress(Exception):  # the library has no common error
                words = plistlib.loads(content)["ProgramArguments"]
                return str(words[words[0] == str(mac_app.installed_app() / mac_app.PROGRAM)])
            return ""
        found = _EXEC_START.search(content.decode(errors="replace"))
        return re.sub(r"\\(.)|%(%)", r"\1\2", found[1] or found[2]) if found else ""

    def _plist(self, command: list[str]) -> dict[str, object]:
        """Return the definition for launchd. The program writes its own log; what it cannot log goes beside it."""
        errors = str(self.log_file.with_suffix(".err"))
        return {
            "Label": self._label,
            "ProgramArguments": command,
            "AssociatedBundleIdentifiers": [mac_app.IDENTIFIER],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": 30,
            # macOS slows other background work down in favour of programs on the screen.
            "ProcessType": "Interactive",
            "StandardOutPath": errors,
            "StandardErrorPath": errors,
        }

    def _unit(self, command: list[str]) -> str:
        """Return the definition for systemd. Status 2 is a wrong flag, with which no start succeeds."""
        program, *arguments = command
        escaped = [_escaped(program), *(_escaped(part).replace("$", "$$") for part in arguments)]
        start = " ".join(f'"{part}"' for part in escaped)
        return (
            f"[Unit]\nDescription={self.program} of mtp-cluster\nAfter=network-online.target\n\n"
            f"[Service]\nType=exec\nExecStart={start}\nRestart=on-failure\nRestartSec=2\n"
            "RestartPreventExitStatus=2\nTimeoutStopSec=30\nLimitNOFILE=65536\n\n"
            "[Install]\nWantedBy=default.target\n"
        )

    def _check_installed(self) -> None:
        if not self.file.exists():
            raise UsageError(f"no service is installed: {self.file} does not exist")

    def _run(self, *arguments: str, check: bool = True) -> str:
        """Run launchctl or systemctl, and return its output. Raises UsageError if it fails and `check` is set."""
        done = self._call(*arguments)
        if check and done.returncode:
            raise _failure(done)
        return (done.stdout + done.stderr).strip()

    @staticmethod
    def _call(*arguments: str) -> CompletedProcess[str]:
        mac = sys.platform == "darwin"
        command = ["launchctl", *arguments] if mac else ["systemctl", "--user", *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{command[0]} does not work here: {error}") from error


def _failure(done: CompletedProcess[str]) -> UsageError:
    said = (done.stdout + done.stderr).strip()
    return UsageError(f"{' '.join(done.args)}: {said or f'status {done.returncode}'}")


_EXEC_START = re.compile(r'^ExecStart=(?:"((?:[^"\\]|\\.)*)"|(\S+))', re.MULTILINE)


def _escaped(text: str) -> str:
    """Return `text` for a quoted word of ExecStart, in which systemd expands %, and $ in all words but the first."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


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
