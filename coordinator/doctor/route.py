"""The network interface of the route to each worker, and bridges that may form a loop."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from coordinator.doctor.command_output import CommandOutput, command_output
from coordinator.doctor.finding import Finding, Verdict
from proto.address import host_of
from proto.rpc.network_interface import LOOPBACK, WIRELESS, route_to

FindRoute = Callable[[str], tuple[str, str]]
"""A function as `route_to`. Tests pass one that returns recorded routes."""


def check_route(name: str, address: str, find_route: FindRoute = route_to) -> Finding:
    """Report the interface that leads to the worker `name` at `address`."""
    interface, kind = find_route(host_of(address))
    if kind == LOOPBACK:
        return Finding(f"route to {name}", Verdict.OK, "this machine", "", {"kind": LOOPBACK})
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
