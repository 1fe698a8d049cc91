"""Slow and cut links between two machines, made by the kernel, and the doctor's findings about them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.network_namespaces import Machine, two_machines
from tests.support.processes.processes import as_worker, ending, launch_worker

CHECK = """
import asyncio, json, sys
from dataclasses import asdict
from coordinator.doctor import links, route
from coordinator.doctor.workers import ReachedWorker
from proto.rpc import link_test

async def few(channel, measure=link_test.measure_link):
    return await measure(channel, small_count=20, large_count=1)

links.measure_link = few
worker = ReachedWorker("w", sys.argv[1], None, "", "")
for _ in sys.stdin:
    found = asyncio.run(links.check_link(worker))
    print(json.dumps(asdict(found) | {"route": route.check_route("w", worker.address).figure}), flush=True)
"""

SECONDS = 60.0


NETEM = ("netem", "delay", "15ms")
"""A link with a delay. Small kernels have no netem; there a link of 20 Mbit/s delays frames of 20 KB by 8 ms."""

NARROW = ("tbf", "rate", "80mbit", "burst", "32kbit", "latency", "400ms")
NARROWER = ("tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms")


@contextmanager
def impaired(machine: Machine, *disciplines: tuple[str, ...]) -> Iterator[None]:
    """Send the packets of `machine` through the first discipline of `tc` that this kernel has."""
    for words in disciplines:
        if _tc(machine, "add", *words):
            break
    else:
        pytest.skip("this kernel has no queueing disciplines for tc")
    yield
    assert _tc(machine, "del")


def _device(machine: Machine) -> str:
    """Return the machine's end of the cable."""
    return "v" + machine.name.rpartition("-")[2]


def _tc(machine: Machine, action: str, *words: str) -> bool:
    """Run `tc qdisc`, and return whether it succeeded."""
    tc = ("tc", "qdisc", action, "dev", _device(machine), "root", *words)
    try:
        done = subprocess.run([*machine.prefix, *tc], check=False, capture_output=True, timeout=10)
    except FileNotFoundError:
        return False
    return done.returncode == 0


class Doctor:
    """A process on a machine that checks its link to one worker, each time it is asked."""

    def __init__(self, machine: Machine, address: str) -> None:
        command = [*machine.prefix, sys.executable, "-c", CHECK, address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Doctor:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=SECONDS)

    def check_link(self) -> dict[str, Any]:
        """Return the doctor's finding about the link now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("check\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


def test_slow_links_are_named(tmp_path: Path) -> None:
    """The doctor names a link with a delay, one with little bandwidth, and one that is cut."""
    with two_machines() as (here, there):
        listen = ("--listen", f"{there.address}:0", "--insecure")
        process = launch_worker(tmp_path, "w", *listen, prefix=there.prefix)
        with ending(process):
            address = as_worker(process).address
            with Doctor(here, address) as doctor:
                good = doctor.check_link()
                with impaired(there, NETEM, NARROWER), impaired(here, NETEM, NARROWER):
                    slow = doctor.check_link()
                with impaired(here, NARROW):
                    narrow = doctor.check_link()
                down = ("ip", "link", "set", _device(here), "down")
                subprocess.run([*here.prefix, *down], check=True, timeout=10)
                cut = doctor.check_link()
    assert good["values"]["p50"] < slow["values"]["p50"]
    assert good["route"].startswith("v")
    assert good["route"].endswith("(virtual)")
    assert (slow["verdict"], "Use a cable" in slow["advice"]) == ("warn", True)
    assert slow["values"]["p50"] >= 5e-3
    assert (narrow["verdict"], "Thunderbolt" in narrow["advice"]) == ("warn", True)
    assert narrow["values"]["bytes_per_second"] < 12e6
    assert cut["verdict"] == "fail"
    assert address in cut["figure"]
