"""`make demo`'s command: a whole cluster on this machine, an answer, its figures, and nothing left running."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from coordinator.cli import PROGRAM, app
from proto import console
from tests.cluster.processes import WITHOUT_TORCH

DEMO_SECONDS = 180.0
"""Five processes import MLX: ten seconds on two idle cores, and minutes where others work."""

PROMPT = "def at(x, y): return x[i] + y[a:key:b] if x[/i] else"
"""Brackets and colons that mean something to rich."""

COMMAND = [
    sys.executable,
    "-c",
    f"{WITHOUT_TORCH}; from coordinator.cli import main; main()",
    "demo",
]


@contextmanager
def demo(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """The demo in a session of its own, so that whatever it starts can be told from the rest."""
    with subprocess.Popen(
        [*COMMAND, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            for left in descendants(process.pid):
                left.kill()
            process.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process that `pid` started, directly or not."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def words_of(processes: list[psutil.Process]) -> set[str]:
    """Every word of their command lines."""
    words: set[str] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words |= set(process.cmdline())
    return words


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """`refused(status, *flags)`: the demo in this process, where Python ends at once; what it says on stderr."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no Python today' >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    handler = signal.getsignal(signal.SIGTERM)

    def run(status: int, *flags: str) -> str:
        with pytest.raises(SystemExit) as end:
            console.run(PROGRAM, lambda: app(["demo", *flags], prog_name=PROGRAM))
        assert end.value.code == status
        return capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_a_mode_that_is_none_is_told_before_anything_starts(refused: Callable[..., str]) -> None:
    """Status 2, and what can be written."""
    assert "--mtp 'banana': write auto" in refused(2, "--mtp", "banana")


@pytest.mark.timeout(20)
def test_a_program_that_ends_at_once_is_not_waited_for(refused: Callable[..., str]) -> None:
    """Status 1, and what it said last."""
    assert "worker-1 ended with status 3: no Python today" in refused(1, "--workers", "1")


@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_the_demo_from_start_to_end() -> None:
    """Three workers with a third of the layers each, text through HTTP, the share of drafts kept, the table of
    stages; status 0, and every process it started has ended."""
    with demo("--max-tokens", "24", "--prompt", PROMPT) as process:
        started: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + DEMO_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            started |= {child.pid: child for child in descendants(process.pid)}
            time.sleep(0.1)
        assert process.returncode == 0
        assert process.stdout is not None
        output = process.stdout.read()
    assert PROMPT in output
    assert re.search(r"24 tokens, first after [\d.]+ s, then [\d.]+ tokens/s", output), output
    assert re.search(r"\d+ % of \d+ drafts kept", output), output
    rows = re.findall(r"(worker-\d) +│ (\d)-(\d) ", output)
    assert {name for name, _, _ in rows} == {"worker-1", "worker-2", "worker-3"}
    layers = sorted(n for _, a, b in rows for n in range(int(a), int(b) + 1))
    assert layers == list(range(8)), output
    assert len(started) >= 4  # some run a program for a moment, to know their hardware
    assert not any(child.is_running() for child in started.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_the_demo_interrupted(number: signal.Signals) -> None:
    """However it is ended, what it started ends with it: here with worker and coordinator both under way."""
    with demo("--workers", "1", "--max-tokens", "4000") as process:
        deadline = time.monotonic() + DEMO_SECONDS
        while not {"--listen", "serve"} <= words_of(started := descendants(process.pid)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(DEMO_SECONDS) != 0
        _, alive = psutil.wait_procs(started, timeout=5)
        assert not alive
