"""`make demo`'s command: a whole cluster on this machine, an answer, its figures, and nothing left running."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.cluster.processes import WITHOUT_TORCH

DEMO_SECONDS = 180.0
"""Five processes import MLX: ten seconds on two idle cores, and minutes where others work."""

PROMPT = "def add(left, right):"

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
    """However it is ended, what it started ends with it."""
    with demo("--workers", "1", "--max-tokens", "4000") as process:
        deadline = time.monotonic() + DEMO_SECONDS
        while len(started := descendants(process.pid)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(DEMO_SECONDS) != 0
        _, alive = psutil.wait_procs(started, timeout=5)
        assert not alive
