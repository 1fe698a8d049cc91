"""Machines that come and go while a group serves: a cable that is pulled and plugged in, and a third worker."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.network_namespaces import Machine, two_machines
from tests.support.processes.processes import (
    Process,
    as_coordinator,
    ending,
    launch,
    launch_coordinator,
    launch_worker,
    serving,
)
from tests.support.processes.reserved_port import reserved_port

MODEL = ("builtin", "--dtype", "float32")
SECONDS = 120.0
LONGEST_SILENCE = 15.0
"""Seconds. Goal for an answer whose group lost a machine."""

ASK = """
import json, sys, time, urllib.request
body = {"prompt": "def fibonacci(n):", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(), headers)
text, silence, last = "", 0.0, time.monotonic()
for line in urllib.request.urlopen(request, timeout=100):
    if not line.startswith(b"data: {"):
        continue
    chunk = json.loads(line[6:])
    assert "error" not in chunk, chunk
    text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    silence, last = max(silence, time.monotonic() - last), time.monotonic()
print(json.dumps([text, silence]))
"""


class Client:
    """A client that asks one question, on a machine."""

    def __init__(self, url: str, prefix: tuple[str, ...] = ()) -> None:
        self._found: list[Any] = []
        command = [*prefix, sys.executable, "-c", ASK, url]
        self._thread = threading.Thread(target=self._run, args=(command,))
        self._thread.start()

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        self._found = [done.stderr, *(json.loads(done.stdout) if not done.returncode else ())]

    def answer(self) -> tuple[str, float]:
        """Return the text, and the longest time without a piece of it."""
        self._thread.join(SECONDS)
        assert len(self._found) == 3, self._found
        return self._found[1], self._found[2]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the answer of one process."""
    with serving(tmp_path_factory.mktemp("alone"), MODEL[0], [], *MODEL[1:]) as coordinator:
        return Client(coordinator.url).answer()[0]


@pytest.mark.slow
def test_a_pulled_cable_changes_no_answer(tmp_path: Path, expected: str) -> None:
    """The machine that is left answers alone, token for token, and the next answer has the group again."""
    with two_machines() as machines, ExitStack() as stack:

        def start(machine: Machine, name: str, module: str, *words: str) -> Process:
            state = ("--state-dir", str(tmp_path / machine.name), "--insecure", "--no-mdns")
            process = launch(tmp_path, name, module, (*words, *state), prefix=machine.prefix)
            return stack.enter_context(ending(process))

        named: list[str] = []
        for machine in machines:
            listen = ("--listen", f"{machine.address}:50505", "--direct", machine.address)
            start(machine, machine.name, "worker.cli", "--model", MODEL[0], *listen)
            named += ["--worker", f"{machine.address}:50505"]
        flags = (*MODEL, "--parallel", "tensor", "--nodes", "2", "--port", "0", *named)
        coordinator = start(machines[0], "coordinator", "coordinator.cli", "serve", *flags)
        url = as_coordinator(coordinator).url
        client = Client(url, machines[0].prefix)
        time.sleep(1.5)
        machines[1].pull_cable()
        text, silence = client.answer()
        assert text == expected
        assert silence < LONGEST_SILENCE
        machines[1].plug_cable_in()
        coordinator.wait_for("group", SECONDS, count=2)
        assert Client(url, machines[0].prefix).answer()[0] == expected


@pytest.mark.slow
def test_a_third_worker_joins_while_a_group_serves(tmp_path: Path, expected: str) -> None:
    """The answer goes on, and so does the group: three machines cannot share its heads."""
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port("127.0.0.1")) for _ in range(3)]
        named = [word for port in ports for word in ("--worker", f"127.0.0.1:{port}")]
        flags = (*MODEL, "--parallel", "tensor", "--nodes", "2", *named)

        def start(number: int) -> None:
            listen = ("--model", MODEL[0], "--listen", f"127.0.0.1:{ports[number]}")
            worker = launch_worker(tmp_path, f"w{number}", *listen)
            stack.enter_context(ending(worker))

        start(0)
        start(1)
        coordinator = stack.enter_context(ending(launch_coordinator(tmp_path, *flags)))
        url = as_coordinator(coordinator).url
        client = Client(url)
        start(2)
        coordinator.wait_for("worker joined", SECONDS, count=3)
        assert client.answer()[0] == expected
        coordinator.wait_for("the plan stays as it is", SECONDS)
        assert [one["members"] for one in coordinator.records("group")] == [2]
