"""`mtp-coord demo` runs a whole cluster, prints an answer with its figures, and leaves no process running."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from coordinator.cli import PROGRAM, app
from proto.state_dir import STATE_DIR, claim
from proto.terminal import console
from tests.support.processes.processes import WITHOUT_TORCH

DEMO_SECONDS = 180.0
"""Five processes import MLX: ten seconds on two idle cores, and minutes where others work."""

COMMAND = [
    sys.executable,
    "-c",
    f"{WITHOUT_TORCH}; from coordinator.cli import main; main()",
    "demo",
]


@contextmanager
def demo(*flags: str, terminal: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the demo in a session of its own, to find the processes it starts.

    It reads from and writes to `terminal`, or has no terminal."""
    with subprocess.Popen(
        [*COMMAND, *flags],
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.DEVNULL if terminal is None else terminal,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            for left in descendants(process.pid):
                left.kill()
            process.kill()


STYLE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def descendants(pid: int) -> list[psutil.Process]:
    """Return every living process that `pid` started, directly or not."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def words_of(processes: list[psutil.Process]) -> set[str]:
    """Return every word of the command lines of these processes."""
    words: set[str] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words |= set(process.cmdline())
    return words


@pytest.mark.timeout(60)
def test_a_program_that_ends_at_once_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that ends early ends the demo with status 1 and its last lines."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no Python today' >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        console.run(PROGRAM, lambda: app(["demo", "--workers", "1"], prog_name=PROGRAM))
    signal.signal(signal.SIGTERM, handler)
    assert end.value.code == 1
    assert "worker-1 ended with status 3: no Python today" in capsys.readouterr().err


@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_the_demo_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo prints text and the state of the cluster, waits on a terminal, and ends all its processes.

    It does so while another coordinator uses the state directory of its user.
    """
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    claim(tmp_path)
    flags = ("--max-tokens", "24")
    person, program = os.openpty()
    output, waited, page = "", False, None
    started: dict[int, psutil.Process] = {}
    with (
        os.fdopen(person, "r+b", buffering=0) as terminal,
        demo(*flags, terminal=program) as process,
    ):
        os.close(program)
        deadline = time.monotonic() + DEMO_SECONDS
        while time.monotonic() < deadline:
            started |= {child.pid: child for child in descendants(process.pid)}
            try:
                while select.select([terminal], [], [], 0.1)[0]:
                    output += STYLE.sub("", terminal.read(65536).decode(errors="replace"))
            except OSError:  # no process has the terminal any more
                break
            if page is None and (page := re.search(r"The page: (http://127\.0\.0\.1:\d+/)\s", output)):
                assert httpx.get(page[1]).status_code == 200, "the address was printed too early"
            if not waited and "Enter ends the demo." in output:
                waited = True
                terminal.write(b"\n")
        assert process.wait(DEMO_SECONDS) == 0, output
    output = output.replace("\r", "")
    assert page, output
    # One line of progress is drawn again and again. It is erased before the address.
    assert output.partition("The page:")[0].strip().count("\n") == 0, output
    assert "starting worker-1, worker-2, worker-3, coordinator" in output
    assert "starting: 3 of 4 programs are ready" in output
    assert waited, output
    assert re.search(r"Chat with it in a browser: http://127\.0\.0\.1:\d+/", output), output
    assert "Read the configuration file" in output
    assert re.search(r"24 tokens, first after [\d.]+ s, then [\d.]+ tokens/s", output), output
    assert re.search(r"\d+% of the head.s drafts accepted", output), output
    rows = re.findall(r"(worker-\d) +(\d)-(\d) ", output)
    assert {name for name, _, _ in rows} == {"worker-1", "worker-2", "worker-3"}
    layers = sorted(n for _, a, b in rows for n in range(int(a), int(b) + 1))
    assert layers == list(range(8)), output
    assert len(started) >= 4  # some run a program for a moment, to know their hardware
    assert not any(child.is_running() for child in started.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.timeout(DEMO_SECONDS + 120)
def test_the_demo_interrupted(number: signal.Signals) -> None:
    """An interrupted demo ends all its processes."""
    with demo("--workers", "1", "--max-tokens", "4000") as process:
        deadline = time.monotonic() + DEMO_SECONDS
        while not {"--listen", "serve"} <= words_of(started := descendants(process.pid)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(DEMO_SECONDS) != 0
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
