"""The network interfaces of this machine: the kind of link to a peer, and which peers are local."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil

NO_ROUTE = "No route to host"

ADVICE = (
    "macOS may block this program from the local network, above all if launchd started it as an agent. "
    "Run it as a LaunchDaemon (deploy/README.md), or start it from Terminal and allow Terminal in "
    "System Settings > Privacy & Security > Local Network"
)


def with_advice(details: str) -> str:
    """Return the text of a failed connection, with ADVICE if macOS refused it with `No route to host` (errno 65)."""
    if sys.platform == "darwin" and NO_ROUTE in details:
        return f"{details}. {ADVICE}"
    return details


LOOPBACK = "loopback"
"""The kind of a way that stays on this machine."""

WIRELESS = "Wi-Fi"
THUNDERBOLT = "Thunderbolt"
ETHERNET = "Ethernet"
VIRTUAL = "virtual"
"""The kind of an interface without hardware: a bridge, a tunnel, or the interface of a container."""

UNKNOWN = "unknown"

SYSFS = Path("/sys/class/net")
"""Linux' description of each interface. It shows the interfaces of the network namespace that mounted it."""

PORTS = ("networksetup", "-listallhardwareports")
"""The command of macOS that prints the name of each hardware port and its interface."""

PROGRAM_SECONDS = 5.0
"""Seconds. Longest run of PORTS, which answers from memory."""

DISCARD_PORT = 9
"""Any port serves: a UDP socket that connects chooses its own address and sends nothing."""


def route_to(host: str) -> tuple[str, str]:
    """Return the interface on the way to `host` and its kind. Without a route the interface is empty.

    May block for PROGRAM_SECONDS.
    """
    own = own_address(host)
    if own is None:
        return "", "no route"
    interface = interface_with(own)
    if is_own(own, host):
        return interface, LOOPBACK
    return interface, kind_of(interface)


def interface_kind(own: str, peer: str) -> str:
    """Return the kind of the interface that a connection from address `own` to address `peer` uses."""
    return LOOPBACK if is_own(own, peer) else kind_of(interface_with(own))


def is_own(own: str, peer: str) -> bool:
    """Return whether `peer`, reached from the address `own`, is this machine."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(_plain(peer)).is_loopback:
            return True
    return _plain(own) == _plain(peer)


def own_address(host: str) -> str | None:
    """Return the address from which this machine reaches `host`, or None without a route."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_with(address: str) -> str:
    """Return the name of the interface that has `address`, or an empty text."""
    wanted = _plain(address)
    for name, entries in psutil.net_if_addrs().items():
        if any(_plain(entry.address) == wanted for entry in entries):
            return name
    return ""


def kind_of(interface: str) -> str:
    """Return the kind of an interface of this machine."""
    if sys.platform == "darwin":
        return mac_kind(interface, hardware_ports())
    return linux_kind(interface) if interface else UNKNOWN


def mac_kind(interface: str, ports: str) -> str:
    """Return the name of the hardware port `interface` in the output of `networksetup -listallhardwareports`."""
    port = re.search(rf"Hardware Port: (.+)\nDevice: {re.escape(interface)}\n", ports)
    return port[1] if interface and port else UNKNOWN


def linux_kind(interface: str, sysfs: Path = SYSFS) -> str:
    """Return the kind of an interface by Linux' description of it."""
    place = sysfs / interface
    if (place / "wireless").exists() or (place / "phy80211").exists():
        return WIRELESS
    if (place / "device" / "driver").resolve().name.startswith("thunderbolt"):
        return THUNDERBOLT
    return VIRTUAL if "virtual" in place.resolve().parts else ETHERNET


@functools.cache
def hardware_ports() -> str:
    """Return the hardware ports of this Mac. They are read once: a new adapter needs a new start of the program."""
    try:
        return subprocess.run(
            PORTS, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _plain(address: str) -> str:
    """Return an address without the interface of a link-local one and without IPv6's form of an IPv4 address."""
    return address.partition("%")[0].removeprefix("::ffff:")
