"""The start of a server: required workers, late workers, pinned layers, downloads, and the mistakes of a new user."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints.hub import Hub
from tests.support.processes.processes import (
    Coordinator,
    Process,
    as_coordinator,
    as_worker,
    ending,
    launch,
    launch_coordinator,
    launch_worker,
)
from tests.support.processes.reserved_port import reserved_port
from tests.support.processes.waits import wait_until

REPO = "someone/some-model"

DEADLINE = 60.0
"""Seconds. Deadline of a wait for a process."""

INTERRUPT_SECONDS = 5.0
"""Seconds from Ctrl-C to the end of a process that downloads, on a busy machine."""


def url_of(process: Process) -> str:
    """Return the URL that the coordinator logs while it waits for workers."""
    pattern = re.compile(r"waiting for workers.*Status: (\S+)/status")
    wait_until(lambda: pattern.search(process.text()), "a line about missing workers")
    found = pattern.search(process.text())
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_a_server_waits_for_its_workers_and_uses_late_ones(tmp_path: Path, toy: Path) -> None:
    """--nodes 2 waits past the usual five seconds, answers /status meanwhile, and uses a third worker when idle."""

    def worker(index: int) -> Process:
        listen = f"127.0.0.1:{ports[index]}"
        return launch_worker(tmp_path, f"w{index}", "--listen", listen, "--model", str(toy))

    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        flags = [flag for port in ports for flag in ("--worker", f"127.0.0.1:{port}")]
        launched = launch_coordinator(tmp_path, "--model", str(toy), "--nodes", "2", *flags)
        process = stack.enter_context(ending(launched))
        url = url_of(process)
        status = httpx.get(f"{url}/status", timeout=DEADLINE).json()
        assert status["ready"] is False
        assert status["detail"] == "waiting for workers: 0 of 2"
        with ending(worker(0)) as first, ending(worker(1)) as second:
            as_worker(first)
            as_worker(second)
            coordinator = as_coordinator(process)
            assert not coordinator.records("serving alone")
            assert spans(coordinator) == 2
            with ending(worker(2)) as third:
                as_worker(third)
                changed = coordinator.wait_for("changing the plan")
                assert changed["reason"] == "w2 joined"
                wait_until(lambda: spans(coordinator) == 3, "three nodes with layers")
                (loaded, *_) = third.records("stage loaded")
                assert loaded["time"] < changed["time"], "the plan before serves while it loads"
                assert not coordinator.records("pipeline failed"), "a wanted change is no failure"


def spans(coordinator: Coordinator) -> int:
    """Return how many nodes hold layers."""
    status = httpx.get(f"{coordinator.url}/status", timeout=DEADLINE).json()
    return sum(1 for node in status["nodes"] if node["span"])


def test_ctrl_c_counts_the_answers_that_it_ends(tmp_path: Path, toy: Path) -> None:
    """The log says how many answers end, and a second Ctrl-C ends them at once."""
    flags = ("--model", str(toy), "--single-node")
    with ending(launch_coordinator(tmp_path, *flags)) as process:
        coordinator = as_coordinator(process)
        body = {"prompt": [5], "max_tokens": 4000, "stream": True, "ignore_eos": True}
        url = f"{coordinator.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=DEADLINE) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            process.popen.send_signal(signal.SIGINT)
            process.wait_for("ending 1 answer within 5 s; again to stop")
            process.popen.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 130
    assert "Traceback" not in process.text()


# ---- downloads


@pytest.fixture(scope="module")
def hub(toy: Path) -> Iterator[Hub]:
    """Yield a hub that stops sending after some bytes of weights."""
    with Hub() as hub:
        hub.add(REPO, toy)
        yield hub
        hub.faults.hold_at = math.inf


@pytest.mark.parametrize("command", ["serve", "generate", "convert"])
def test_ctrl_c_ends_a_download_at_once(hub: Hub, tmp_path: Path, command: str) -> None:
    """The process ends with status 130, keeps what has arrived, and `serve` shows the bytes meanwhile."""
    hub.sent.clear()
    hub.faults.hold_at = 100_000
    home = tmp_path / "home"
    words = {
        "serve": ["serve", REPO, "--single-node", "--port", "0"],
        "generate": ["generate", "Hello", "--model", REPO],
        "convert": ["convert", "--hf-path", REPO, "--mlx-path", str(tmp_path / "out")],
    }[command]
    start = [sys.executable, "-c", "from coordinator.cli import main; main()", *words]
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen(start, stderr=log, env=environment(hub, home)) as process:
        try:
            wait_until(lambda: has_part(home), "bytes of a file")
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 130
            assert time.monotonic() - sent < INTERRUPT_SECONDS
        finally:
            process.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert has_part(home)
    hub.faults.hold_at = math.inf


def test_a_server_answers_while_it_downloads(hub: Hub, tmp_path: Path) -> None:
    """/status has bytes and speed, the API answers 503, and the server serves once the file is complete."""
    hub.sent.clear()
    hub.faults.hold_at = 100_000
    env = {**hub.environment(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        flags = ["serve", REPO, "--single-node", "--port", str(port)]
        launched = launch(tmp_path, "downloading", "coordinator.cli", flags, env=env)
        process = stack.enter_context(ending(launched))
        url = f"http://127.0.0.1:{port}"

        def shows_bytes() -> bool:
            with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                detail = str(httpx.get(f"{url}/status", timeout=DEADLINE).json()["detail"])
                return detail.startswith("downloading the model: ") and "kB of" in detail
            return False

        wait_until(shows_bytes, "bytes in /status")
        assert httpx.get(f"{url}/health", timeout=DEADLINE).status_code == 200
        asked = httpx.post(f"{url}/v1/chat/completions", json={}, timeout=DEADLINE)
        assert asked.status_code == 503
        assert "downloading" in asked.json()["error"]["message"]
        hub.faults.hold_at = math.inf
        coordinator = as_coordinator(process)
        assert httpx.get(f"{coordinator.url}/status", timeout=DEADLINE).json()["ready"]


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Return the environment of a process that uses `hub` and its own cache."""
    return {**os.environ, **hub.environment(home), "HF_HUB_DISABLE_XET": "1"}


def has_part(home: Path) -> bool:
    """Return True if some bytes of a file have arrived. Files and folders may go meanwhile."""
    for at, _, names in os.walk(home):
        for part in (Path(at, name) for name in names if name.endswith(".part")):
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_size:
                    return True
    return False
