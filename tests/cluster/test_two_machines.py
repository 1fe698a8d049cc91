"""The README's session on two machines: two network namespaces, no --insecure, and nothing readable between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes.network_namespaces import Machine, capturing, two_machines
from tests.support.processes.processes import Process, ending, launch

PROMPT = "Zwiebelkuchen und Federweisser"
DEADLINE = 90.0
ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "builtin", "prompt": sys.argv[2], "max_tokens": 12}).encode()
request = urllib.request.Request(sys.argv[1] + "/completions", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def start(machine: Machine, folder: Path, name: str, program: str, *words: str) -> Process:
    """Start a program on a machine, with a state directory of that machine."""
    state = ("--state-dir", str(folder / f"state-{machine.address}"))
    return launch(folder, name, program, (*words, *state), prefix=machine.prefix)


def test_the_session_of_the_readme(tmp_path: Path) -> None:
    """mac-2 joins by one line and serves layers. mDNS finds both workers. Packets hold no prompt and no token."""
    with two_machines() as (mac_1, mac_2), capturing(mac_2, tmp_path / "packets"):
        serve = ("serve", "builtin", "--nodes", "2", "--own-worker", "--port", "0", "--wait", "80")
        coordinator = start(mac_1, tmp_path, "coordinator", "coordinator.cli", *serve)
        with ending(coordinator):
            coordinator.wait_for("machines join here")
            code = "from coordinator.cli import main; main()"
            state = str(tmp_path / f"state-{mac_1.address}")
            create = [sys.executable, "-c", code, "token", "create", "--state-dir", state]
            line = subprocess.run(
                [*mac_1.prefix, *create],
                check=True,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            ).stdout.strip()
            program, *flags = line.split()
            assert program == "mtp-worker"
            other = start(mac_2, tmp_path, "mac-2", "worker.cli", *flags)
            token = flags[-1]
            with ending(other):
                url = coordinator.wait_for("serving", DEADLINE)["url"]
                answer = subprocess.run(
                    [*mac_1.prefix, sys.executable, "-c", ASK, url, PROMPT],
                    check=True,
                    capture_output=True,
                    timeout=DEADLINE,
                )
                assert json.loads(answer.stdout)["choices"][0]["text"]
                addresses = {r["address"] for r in coordinator.records("worker joined")}
    assert addresses == {f"{mac_1.address}:50505", f"{mac_2.address}:50505"}
    packets = (tmp_path / "packets").read_bytes()
    assert len(packets) > 10_000
    for readable in (PROMPT, token, "mtpcluster.v1", "builtin", "Signals"):
        assert readable.encode() not in packets, readable
    joined = other.records("joined")
    assert joined, "the log says when the machine has joined"
