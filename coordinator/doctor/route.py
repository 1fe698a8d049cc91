"""The network interface of the route to each worker, and bridges that may form a loop."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from coordinator.doctor.command_output import CommandOutput, command_output
from coordinator.doctor.finding import Finding, Verdict
from proto.address import host_of, is_loopback

WIRELESS = "Wi-Fi"


def check_route(name: str, address: str, output: CommandOutput = command_output) -> Finding:
    """Report the interface that leads to the worker `name` at `address`."""
    host = host_of(address)
    if is_loopback(host):
        return Finding(f"route to {name}", Verdict.OK, "this machine", "", {"kind": "loopback"})
    interface, kind = (
        _mac_route(host, output) if sys.platform == "darwin" else _linux_route(host, output)
    )
    values = {"interface": interface, "kind": kind}
    figure = f"{interface or 'unknown interface'} ({kind})"
    if kind == WIRELESS:
        advice = "Wi-Fi delays every token by an uneven time. Use a Thunderbolt or Ethernet cable."
        return Finding(f"route to {name}", Verdict.WARN, figure, advice, values)
    return Finding(f"route to {name}", Verdict.OK, figure, "", values)


def check_bridge(workers: int, output: CommandOutput = command_output) -> Finding:
    """Report a Thunderbolt Bridge of two or more cables, which three Macs in a ring turn into a loop."""
    if sys.platform != "darwin":
        return Finding("Thunderbolt Bridge", Verdict.SKIP, "only on macOS")
    members = re.findall(r"member: (\w+)", output("ifconfig", "bridge0"))
    active = [m for m in members if "status: active" in output("ifconfig", m)]
    values = {"members": members, "active": active}
    figure = f"{len(active)} of {len(members)} ports in use" if members else "none"
    if len(active) > 1 and workers > 1:
        advice = (
            "The bridge has no loop protection: three Macs in a ring flood the network. Connect them in a chain, or "
            "remove the bridge and give each cable its own subnet (deploy/README.md)."
        )
        return Finding("Thunderbolt Bridge", Verdict.WARN, figure, advice, values)
    return Finding("Thunderbolt Bridge", Verdict.OK, figure, "", values)


def _mac_route(host: str, output: CommandOutput) -> tuple[str, str]:
    """Return interface and hardware port, such as `Wi-Fi`, `Ethernet` or `Thunderbolt Bridge`."""
    found = re.search(r"interface: (\w+)", output("route", "-n", "get", host))
    if found is None:
        return "", "no route"
    ports = output("networksetup", "-listallhardwareports")
    pattern = rf"Hardware Port: (.+)\nDevice: {re.escape(found[1])}\n"
    port = re.search(pattern, ports)
    return found[1], port[1] if port else "unknown"


def _linux_route(host: str, output: CommandOutput) -> tuple[str, str]:
    found = re.search(r"\bdev (\S+)", output("ip", "route", "get", host))
    if found is None:
        return "", "no route"
    wireless = Path("/sys/class/net", found[1], "wireless").exists()
    return found[1], WIRELESS if wireless else "Ethernet"
