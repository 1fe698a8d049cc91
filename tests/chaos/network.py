"""Machines in network namespaces whose packets pass a router with delay, loss, reordering, rate limits and cuts.

Every machine but the last has a namespace. The last machine is this process's own namespace: the coordinator runs
there, so that clients reach it over loopback, which is not impaired. The router is `tests.chaos.relay`.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from tests.chaos.packet_link import Impairment

SUBNETS = [f"10.214.{number}" for number in range(1, 255)]
"""The subnets of networks. Each network of this machine has its own, because all share the coordinator's namespace."""

CUT = Impairment(loss=1.0)


class Network:
    """The machines 0 to `count` - 1 and this process's own, which has the number `count`."""

    def __init__(self, count: int, relay: subprocess.Popen[str], token: str, subnet: str) -> None:
        self.own = count
        self._relay = relay
        self._token, self._subnet = token, subnet
        self._links: dict[tuple[int, int], Impairment] = {}

    def address(self, machine: int) -> str:
        """Return the address of a machine."""
        return f"{self._subnet}.{machine + 1}"

    def device(self, machine: int) -> str:
        """Return the network device of a machine."""
        return f"mt{self._token}{machine}"

    def namespace(self, machine: int) -> str:
        """Return the network namespace of a machine."""
        return f"mtp-{self._token}-{machine}"

    def prefix(self, machine: int) -> tuple[str, ...]:
        """Return the command that runs another one on a machine."""
        return ("ip", "netns", "exec", self.namespace(machine))

    def impair(self, machine: int, faults: Impairment) -> None:
        """Impair all packets that a machine sends or receives."""
        for other in range(self.own + 1):
            if other != machine:
                self._links[other, machine] = self._links[machine, other] = faults
        self._configure()

    def cut(self, source: int | None, destination: int | None) -> None:
        """Lose the packets from one machine to another without a sign. None stands for every machine."""
        everyone = range(self.own + 1)
        for a in everyone if source is None else (source,):
            for b in everyone if destination is None else (destination,):
                if a != b:
                    self._links[a, b] = CUT
        self._configure()

    def mend(self) -> None:
        """End all impairments."""
        self._links.clear()
        self._configure()

    def _configure(self) -> None:
        links = [[a, b, asdict(faults)] for (a, b), faults in self._links.items()]
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(links) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline(), "the relay ended"


@functools.cache
def why_no_network() -> str | None:
    """Return why this system permits no network of namespaces, or None if it does."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces and TUN devices need root"
    try:
        with network(1, seed=0):
            return None
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        return str(error)


@contextmanager
def network(count: int, seed: int) -> Iterator[Network]:
    """Run a network of `count` machines besides this one. Raises CalledProcessError where that is not permitted."""
    token = uuid.uuid4().hex[:6]
    with ExitStack() as stack:
        names = [f"mt{token}{machine}" for machine in range(count + 1)]
        command = [sys.executable, "-m", "tests.chaos.relay", str(seed), *names]
        pipe = subprocess.PIPE
        relay = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        stack.enter_context(relay)
        stack.callback(relay.kill)
        assert relay.stdout is not None
        assert relay.stdout.readline(), "the relay has no TUN devices"
        made = Network(count, relay, token, _free_subnet())
        for machine in range(count):
            _run("ip", "netns", "add", made.namespace(machine))
            stack.callback(_run, "ip", "netns", "del", made.namespace(machine))
            _run("ip", "link", "set", made.device(machine), "netns", made.namespace(machine))
        for machine in range(count + 1):
            inside = () if machine == count else ("-n", made.namespace(machine))
            device = made.device(machine)
            _run("ip", *inside, "addr", "add", f"{made.address(machine)}/24", "dev", device)
            _run("ip", *inside, "link", "set", device, "up")
            if inside:
                _run("ip", *inside, "link", "set", "lo", "up")
        stack.callback(relay.kill)  # before its devices disappear with their namespaces
        yield made


def _free_subnet() -> str:
    """Return a subnet that no device of this namespace has."""
    used = _run("ip", "-4", "-oneline", "addr")
    return random.choice([subnet for subnet in SUBNETS if f" {subnet}." not in used])


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, timeout=10, text=True)
    return done.stdout
