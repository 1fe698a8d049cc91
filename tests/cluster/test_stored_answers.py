"""Stored answers over real processes: kill -9, and keys."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Pool
from tests.support.processes.processes import (
    Coordinator,
    as_coordinator,
    ending,
    launch_coordinator,
)
from tests.support.processes.reserved_port import reserved_port
from tests.support.processes.waits import wait_until

MINE, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("mine-1", "other-1"))
PROMPT = "Write a function that adds two numbers."
RESPONSE: dict[str, Any] = {
    "input": PROMPT,
    "max_output_tokens": 300,
    "seed": 7,
    "temperature": 0.8,
}
BACKGROUND = RESPONSE | {"background": True}
PATIENCE = 100.0
"""Seconds. Limit on waits that end within seconds on an idle machine."""


def start(folder: Path, port: int, addresses: list[str], name: str, *flags: str) -> Coordinator:
    """Start a coordinator over the workers with the state directory `folder`, and wait until it serves."""
    workers = [flag for address in addresses for flag in ("--worker", address)]
    process = launch_coordinator(
        folder,
        *("--model", "builtin", "--dtype", "float32", "--mtp", "2", "--wait", str(PATIENCE)),
        *("--port", str(port), "--state-dir", str(folder)),
        *workers,
        *flags,
        name=name,
        env={"MTP_API_KEY": "mine-1 other-1"},
    )
    return as_coordinator(process)


@pytest.fixture
def port() -> Iterator[int]:
    """Keep a port. The second coordinator has the port of the first."""
    with reserved_port() as number:
        yield number


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the data of each event."""
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def deltas(events: list[dict[str, Any]]) -> list[Any]:
    """Return what the events of a response say, with their numbers."""
    return [(e["sequence_number"], e["type"], e.get("delta")) for e in events]


def output_text(response: dict[str, Any]) -> list[str]:
    """Return the texts of a response."""
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_answers_outlive_a_killed_coordinator(pool: Pool, tmp_path: Path, port: int) -> None:
    """After kill -9 a stream and an answer in the background continue, token for token, and only for their key."""
    addresses = pool(2)
    first = start(tmp_path, port, addresses, "first")
    with ending(first), httpx.Client(base_url=first.url, headers=MINE, timeout=PATIENCE) as client:
        with client.stream("POST", "/v1/responses", json=RESPONSE | {"stream": True}) as reply:
            expected = list(events_of(reply.iter_lines()))
        whole = client.post("/v1/responses", json=RESPONSE).json()
        received: list[dict[str, Any]] = []
        with client.stream("POST", "/v1/responses", json=RESPONSE | {"stream": True}) as reply:
            begun = client.post("/v1/responses", json=BACKGROUND).json()
            for event in events_of(reply.iter_lines()):
                received.append(event)
                if len(received) == 30:
                    os.kill(first.pid, signal.SIGKILL)
                    break
    first.wait()
    streamed = received[0]["response"]["id"]
    second = start(tmp_path, port, addresses, "second")
    with (
        ending(second),
        httpx.Client(base_url=second.url, headers=MINE, timeout=PATIENCE) as client,
    ):
        path = f"/v1/responses/{streamed}?stream=true&starting_after=29"
        with client.stream("GET", path) as reply:
            rest = list(events_of(reply.iter_lines()))
        assert deltas(received + rest) == deltas(expected)
        background = f"/v1/responses/{begun['id']}"
        wait_until(lambda: client.get(background).json()["status"] == "completed", "its end")
        assert output_text(client.get(background).json()) == output_text(whole)
        restored = second.records("answer restored")
        assert {record["id"] for record in restored} == {streamed, begun["id"]}
        for answer_id in (begun["id"], streamed):
            assert client.get(f"/v1/responses/{answer_id}", headers=OTHER).status_code == 404
