"""The start and the end of both programs, their open files, and commands whose flags are the fields of a dataclass."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli import COMMANDS, import_command
from proto.errors import CheckpointError, ClusterError, NotReadyError, UsageError
from proto.span import Span
from proto.terminal import console
from proto.terminal.console import WANTED, keep_awake, raise_open_file_limit
from proto.terminal.options import Parsed, takes_options
from tests.support.processes.waits import wait_until

HEAVY = {"mlx", "mlx_lm.models", "torch", "transformers", "fastapi", "grpc", "numpy", "zeroconf"}
LIBRARIES = {"torch", "transformers", "fastapi", "grpc", "mlx_lm.utils"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotReadyError("no plan yet"), 1), (CheckpointError("config.json: no such file"), 2)],
)
def test_an_expected_error_is_one_line_and_its_exit_status(
    error: ClusterError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ClusterError ends the process with its own status and one line on stderr, no traceback."""

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        console.run("mtp-coord", fail)
    assert end.value.code == status
    assert capsys.readouterr().err == f"mtp-coord: {error}\n"


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with 128 + SIGINT and without output."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        console.run("mtp-coord", interrupt)
    assert end.value.code == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["coordinator.cli", "worker.cli"])
def test_help_loads_nothing_heavy(module: str) -> None:
    """`--help` imports no array library, no server and no RPC, so it answers at once."""
    code = (
        f"import sys, {module} as program\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n    program.main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"sys.exit(' '.join(name for name in {HEAVY!r} if sys.modules.get(name)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == ""
    assert "--version" in done.stdout


@pytest.mark.parametrize(
    ("module", "libraries"),
    [
        ("coordinator.cli.cluster_commands", HEAVY | {"google.protobuf", "cryptography", "psutil"}),
        ("coordinator.cli.trust_commands", HEAVY),
        ("coordinator.cli.model_commands", LIBRARIES),
        ("coordinator.cli.convert_commands", LIBRARIES),
        ("worker.node.process", LIBRARIES - {"grpc"}),
    ],
)
def test_a_command_loads_what_it_needs(module: str, libraries: set[str]) -> None:
    """A question to a server loads no array library. No command that reads headers and no worker loads transformers."""
    code = f"import sys, {module}\nsys.exit(' '.join(n for n in {libraries!r} if sys.modules.get(n)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == ""


def test_the_names_of_mlx_lm_are_there_when_they_are_asked_for() -> None:
    """`import mtp` runs the parts of mlx-lm one by one, and the package itself on demand."""
    code = (
        "import sys, mtp, mlx_lm\nassert 'mlx_lm.utils' not in sys.modules\n"
        "from mlx_lm import generate, load\nassert callable(generate) and callable(load)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_says_what_the_help_page_says(name: str) -> None:
    """The line on the help page is the first sentence of the command's own help."""
    command = import_command(name)
    assert command.name == name
    first_sentence = " ".join((command.help or "").split()).partition(". ")[0].rstrip(".")
    assert f"{first_sentence}." == COMMANDS[name][2]


BUSY = """
import threading, time
import mlx.core as mx
from proto.terminal import console

def compute():
    x = mx.random.normal((64, 64))
    while True:
        for _ in range(20):
            x = (x @ x) * 0.01
        mx.async_eval(x)
        x.tolist()

threading.Thread(target=compute, daemon=True).start()
time.sleep(0.3)
console.run_process("mtp-worker", lambda: print("the last line"))
"""


def test_a_thread_that_computes_does_not_abort_the_end() -> None:
    """A program whose engine still computes ends with status 0 and its whole output."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the last line\n", "")


def test_an_error_keeps_its_status_at_the_end_of_the_process() -> None:
    """The status of an error is the status of the process."""
    code = "import sys; from proto.terminal import console; console.run_process('x', lambda: sys.exit(3))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 3


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake `caffeinate` on a pretended Mac. It writes its process id and arguments to the returned file."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "caffeinate"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$$ $@" > {said}.new && mv {said}.new {said}\nexec sleep 60\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.platform", "darwin")
    return said


def test_caffeinate_runs_while_the_program_serves(caffeinate: Path) -> None:
    """Inside the block `caffeinate` holds an assertion for this process, and it has ended afterwards."""
    with keep_awake():
        wait_until(caffeinate.exists, "the start of caffeinate")
        pid, *arguments = caffeinate.read_text().split()
        assert arguments == ["-i", "-s", "-w", str(os.getpid())]
        assert psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(pid))


def test_a_mac_without_caffeinate_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A missing program is logged and does not stop the start."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("PATH", "/nonexistent")
    with keep_awake():
        pass
    assert "may fall asleep" in caplog.text


INFINITE = resource.RLIM_INFINITY


class FakeLimits:
    """The soft and the hard limit of a process. The system refuses soft limits above `ceiling`."""

    def __init__(self, patch: pytest.MonkeyPatch, soft: int, hard: int, ceiling: int) -> None:
        self.soft, self.hard, self.ceiling = soft, hard, ceiling
        patch.setattr(resource, "getrlimit", lambda which: (self.soft, self.hard))
        patch.setattr(resource, "setrlimit", self.set)

    def set(self, which: int, limits: tuple[int, int]) -> None:
        """Change the limits, as `resource.setrlimit` does."""
        if limits[0] > self.ceiling or limits[1] != self.hard:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = limits[0]


@pytest.mark.parametrize(
    ("soft", "hard", "ceiling", "expected"),
    [
        (256, INFINITE, 10**9, WANTED),  # launchd on macOS
        (1024, 4096, 10**9, 4096),
        (2**20, 2**20, 2**20, 2**20),
        (INFINITE, INFINITE, 10**9, INFINITE),
        (256, INFINITE, 1000, 256),  # kern.maxfilesperproc
    ],
)
def test_the_limit_is_raised_as_far_as_permitted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, ceiling: int, expected: int
) -> None:
    """The soft limit becomes WANTED or the hard limit, is never lowered, and a refusal is no error."""
    limits = FakeLimits(monkeypatch, soft, hard, ceiling)
    raise_open_file_limit()
    assert limits.soft == expected


IMPORT = """
import resource, sys
from proto.terminal.console import keep_open_file_limit
keep_open_file_limit()
sys.modules["torch"] = None
import mlx_lm.utils
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_mlx_lm_leaves_the_limit() -> None:
    """mlx-lm can be imported under a low hard limit, which stays. Other limits can be changed."""
    command = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "(256, 256) (0, 0)\n", done.stderr


FOUR = Span(0, 4)


@dataclass(frozen=True)
class Options:
    """One field of each form."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory."), typer.Option()]
    layers: Annotated[Span | None, typer.Option(), Parsed(Span.parse)] = FOUR
    stop: Annotated[tuple[str, ...], typer.Option()] = ()
    port: Annotated[int, typer.Option(min=0, envvar="PORT")] = 8080


def options_of(*words: str, **environment: str) -> Options:
    """Return the options of the words. Raises the errors of the command."""
    found: list[Options] = []
    app = typer.Typer()

    @app.command()
    @takes_options(Options)
    def command(options: Options) -> None:
        found.append(options)

    outcome = CliRunner().invoke(app, words, env=environment, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return found[0]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["m"], {}),
        (["--model", "m"], {}),
        (["m", "--layers", "2-5"], {"layers": Span(2, 6)}),
        (["m", "--stop", "a", "--stop", "b"], {"stop": ("a", "b")}),
        (["m", "--port", "0"], {"port": 0}),
    ],
)
def test_each_flag_sets_its_field(words: list[str], change: dict[str, Any]) -> None:
    """Positions, parsed texts, repeated flags and plain types become the values of the fields."""
    assert vars(options_of(*words)) == vars(Options("m")) | change


def test_the_environment_sets_a_field() -> None:
    """The variable of an option is read."""
    assert options_of("m", PORT="7").port == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--model", "b"], "name one model, not both 'a' and --model 'b'"),
        ([], "name a model. A directory."),
        (["m", "--layers", "x"], "layers 'x'"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str) -> None:
    """Two values, none and an unreadable text are errors that name the flag."""
    with pytest.raises(UsageError) as raised:
        options_of(*words)
    assert message in str(raised.value)
