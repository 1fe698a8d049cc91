"""Two network namespaces joined by a cable, as two machines, and a capture of the packets between them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CAPTURE = """
import socket, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
with open(sys.argv[1], "wb") as file:
    print("capturing", flush=True)
    while True:
        file.write(tap.recv(65536))
        file.flush()
"""


@dataclass(frozen=True)
class Machine:
    """One namespace. `prefix` runs a command in it."""

    name: str
    address: str
    cable: str
    """Name of its end of the cable."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another one on this machine."""
        return ("ip", "netns", "exec", self.name)

    def pull_cable(self) -> None:
        """End the link. No packet of this machine or to it arrives from now on, and none says so."""
        _ip("-n", self.name, "link", "set", self.cable, "down")

    def plug_cable_in(self) -> None:
        """Start the link again, with the address of before."""
        _ip("-n", self.name, "link", "set", self.cable, "up")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines with the addresses 10.213.77.1 and .2. Skip the test where the system does not permit it."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2")
    token = uuid.uuid4().hex[:8]
    machines = tuple(
        Machine(f"mtp-{letter}-{token}", f"10.213.77.{number}", f"v{token}") for number, letter in enumerate("ab", 1)
    )
    made = []
    try:
        try:
            for machine in machines:
                _ip("netns", "add", machine.name)
                made.append(machine.name)
            cable = ("link", "add", f"v{token}", "netns", machines[0].name, "type", "veth")
            _ip(*cable, "peer", "name", f"v{token}", "netns", machines[1].name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
        for machine in machines:
            inside = ("-n", machine.name)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "addr", "add", f"{machine.address}/24", "dev", f"v{token}")
            _ip(*inside, "link", "set", f"v{token}", "up")
            _ip(*inside, "route", "add", "224.0.0.0/4", "dev", f"v{token}")
        yield machines[0], machines[1]
    finally:
        for name in made:
            _ip("netns", "del", name)


@contextmanager
def capturing(machine: Machine, file: Path) -> Iterator[None]:
    """Write every packet on the interfaces of `machine` to `file` while the block runs."""
    command = [*machine.prefix, sys.executable, "-c", CAPTURE, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)
