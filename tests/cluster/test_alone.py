"""The coordinator's own process continues open streams when no worker is left."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api.streams import tokens_of_stream
from tests.support.processes.processes import (
    as_coordinator,
    ending,
    launch_coordinator,
    running_workers,
)

BODY: dict[str, Any] = {
    "prompt": "def read(path):\n    ",
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
}
EARLY = 10
"""Tokens received before the workers end."""


@pytest.mark.parametrize("how", ["kill", pytest.param("terminate", marks=pytest.mark.slow)])
def test_streams_go_on_alone(tmp_path: Path, how: str) -> None:
    """All workers are killed, or asked to leave, during an answer, and it continues here with the same tokens.

    A plain request in between is answered.
    """
    with running_workers(tmp_path, "builtin", 2) as workers, ThreadPoolExecutor() as threads:
        flags = [flag for worker in workers for flag in ("--worker", worker.address)]
        process = launch_coordinator(tmp_path, *flags, "--dtype", "float32", "--wait", "3")
        with ending(process):
            coordinator = as_coordinator(process)
            url = f"{coordinator.url}/v1/completions"
            between: list[Future[httpx.Response]] = []

            def lose_all() -> None:
                for worker in workers:
                    getattr(worker.popen, how)()
                coordinator.wait_for("pipeline failed" if how == "kill" else "plan replaced")
                between.append(threads.submit(httpx.post, url, json=BODY, timeout=60))

            undisturbed = tokens_of_stream(url, BODY, EARLY, lambda: None)
            assert tokens_of_stream(url, BODY, EARLY, lose_all) == undisturbed
            reply = between[0].result(60)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == undisturbed
            assert coordinator.records("serving alone")
            status = httpx.get(f"{coordinator.url}/status", timeout=60).json()
            assert (1 if how == "kill" else 0) <= status["recoveries"] <= (len(workers) if how == "kill" else 0)
