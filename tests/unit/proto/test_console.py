"""The start and the end of both programs: proto/terminal/console.py and the lazy `mtp-coord`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

from coordinator.cli import COMMANDS, import_command
from proto.errors import CheckpointError, ClusterError, NotReadyError
from proto.terminal import console

HEAVY = {"mlx", "mlx_lm", "torch", "transformers", "fastapi", "grpc", "numpy", "zeroconf"}


def run_program(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run an installed entry point, as a shell does."""
    (entry,) = entry_points(group="console_scripts", name=name)
    code = f"import sys, {entry.module} as m; sys.argv[0] = {name!r}; sys.exit(m.{entry.attr}())"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )


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


def test_a_bug_keeps_its_traceback() -> None:
    """Other exceptions keep their traceback."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        console.run("mtp-coord", fail)


@pytest.mark.parametrize("program", ["mtp-worker", "mtp-coord"])
def test_version(program: str) -> None:
    """`--version` names the release and the wire protocol, in one line on stdout."""
    done = run_program(program, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"{program} {version('mtp-cluster')}, wire protocol ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("program", ["mtp-worker", "mtp-coord"])
def test_a_flag_that_does_not_exist_is_a_usage_error(program: str) -> None:
    """A wrong flag ends with status 2 and its name on stderr."""
    done = run_program(program, "--no-such-flag")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--no-such-flag" in done.stderr


def test_a_mistyped_command_is_a_usage_error() -> None:
    """A wrong command ends with status 2 and the closest name."""
    done = run_program("mtp-coord", "serv")
    assert done.returncode == 2
    assert "serv" in done.stderr


@pytest.mark.parametrize("module", ["coordinator.cli", "worker.cli"])
def test_help_loads_nothing_heavy(module: str) -> None:
    """`--help` imports no array library, no server and no RPC, so it answers at once."""
    code = (
        f"import sys, {module} as program\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n    program.main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"sys.exit(' '.join({HEAVY!r} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == ""
    assert "--version" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_says_what_the_help_page_says(name: str) -> None:
    """The line on the help page is the first sentence of the command's own help."""
    command = import_command(name)
    assert command.name == name
    first_sentence = " ".join((command.help or "").split()).partition(". ")[0].rstrip(".")
    assert f"{first_sentence}." == COMMANDS[name]


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
    done = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the last line\n", "")


def test_an_error_keeps_its_status_at_the_end_of_the_process() -> None:
    """The status of an error is the status of the process."""
    code = "import sys; from proto.terminal import console; console.run_process('x', lambda: sys.exit(3))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 3
