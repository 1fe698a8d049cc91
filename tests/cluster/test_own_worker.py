"""`serve --own-worker`: a worker in a process of its own, which counts like any other and ends with the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import psutil

from tests.support.processes.processes import (
    Coordinator,
    as_coordinator,
    ending,
    launch_coordinator,
)
from tests.support.processes.waits import wait_until

BODY = {"model": "builtin", "prompt": "def fibonacci(n):", "max_tokens": 400, "temperature": 0}


def own_pid(server: Coordinator) -> int:
    return int(str(server.records("the worker of this machine starts")[-1]["pid"]))


def test_the_own_worker_serves_is_restarted_and_ends_with_the_server(tmp_path: Path) -> None:
    """It holds the layers, a killed one comes back in the middle of an answer, and a stop leaves none behind."""
    flags = ("builtin", "--own-worker", "--own-layers", "0-7")
    with ending(launch_coordinator(tmp_path, *flags)) as launched:
        server = as_coordinator(launched)
        nodes = httpx.get(f"{server.url}/status").json()["nodes"]
        assert [(n["span"], n["health"]) for n in nodes] == [("0-7", "ready")]
        first = own_pid(server)
        url = f"{server.url}/v1/completions"
        expected = httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"]
        with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            text = _text(next(lines))
            os.kill(first, signal.SIGKILL)
            text += "".join(_text(line) for line in lines)
        assert text == expected
        wait_until(lambda: own_pid(server) != first, "a new worker", 20)
        second = own_pid(server)
        log = (tmp_path / "coordinator-state" / "logs" / "own-worker.log").read_text()
        assert log.count("worker ready") >= 1
    wait_until(lambda: not psutil.pid_exists(second), "the end of the worker", 30)


def test_the_own_worker_ends_with_a_killed_server(tmp_path: Path) -> None:
    with ending(launch_coordinator(tmp_path, "builtin", "--own-worker")) as launched:
        server = as_coordinator(launched)
        pid = own_pid(server)
        server.kill()
        wait_until(lambda: not psutil.pid_exists(pid), "the end of the worker", 40)


def _text(line: str) -> str:
    with contextlib.suppress(ValueError, LookupError):
        return str(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return ""
