"""The coordinator's own process continues open streams when no worker is left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.processes.processes import (
    Coordinator,
    as_coordinator,
    ending,
    launch,
    running_workers,
)

BODY = {
    "prompt": "def read(path):\n    ",
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 5,
    "ignore_eos": True,
    "stream": True,
}
EARLY = 10
"""Tokens received before the workers end."""


class Client:
    """One streamed answer: its text, and the keep-alive comments between its pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.pieces = 0
        self.comments: list[int] = []
        """For each keep-alive, the number of pieces before it."""

    def ask(self, url: str, when_early: Callable[[], None]) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith(": keep-alive"):
                    self.comments.append(self.pieces)
                elif line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    self.pieces += 1
                    if self.pieces == EARLY:
                        when_early()


@pytest.mark.parametrize("how", ["kill", pytest.param("terminate", marks=pytest.mark.slow)])
def test_streams_go_on_alone(tmp_path: Path, how: str) -> None:
    """All workers are killed, or asked to leave, during an answer, and it continues here with the same tokens.

    Its client receives keep-alives meanwhile, and a plain request in between is answered.
    """
    with running_workers(tmp_path, "builtin", 2) as workers:
        flags = [flag for worker in workers for flag in ("--worker", worker.address)]
        flags += ["--dtype", "float32", "--port", "0", "--no-mdns", "--wait", "3"]
        module = "tests.support.processes.fast_keep_alive_coordinator"
        with ending(launch(tmp_path, "coordinator", module, ["serve", *flags])) as process:
            coordinator = as_coordinator(process)
            undisturbed, touched = Client(), Client()
            undisturbed.ask(coordinator.url, lambda: None)
            between: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: between.append(plain(coordinator)))

            def lose_all() -> None:
                for worker in workers:
                    getattr(worker.popen, how)()
                coordinator.wait_for("pipeline failed" if how == "kill" else "plan replaced")
                asking.start()

            touched.ask(coordinator.url, lose_all)
            asking.join(60)
            assert coordinator.records("serving alone")
            assert touched.text == undisturbed.text
            assert any(pieces >= EARLY for pieces in touched.comments), "no keep-alive meanwhile"
            (reply,) = between
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["text"] == undisturbed.text
            status = httpx.get(f"{coordinator.url}/status", timeout=60).json()
            assert 1 <= status["recoveries"] <= len(workers)


def plain(coordinator: Coordinator) -> httpx.Response:
    body = {**BODY, "stream": False}
    return httpx.post(f"{coordinator.url}/v1/completions", json=body, timeout=60)
