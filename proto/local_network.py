"""macOS's refusal of the local network to a program, told apart from a host that is unreachable."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence

NO_ROUTE = "No route to host"
"""The text of EHOSTUNREACH."""

NO_ROUTE_NUMBER = 65
"""EHOSTUNREACH of macOS: the answer to a refused program at once, and for a silent host after five ARP requests."""

REFUSES = "macOS refuses this program the local network"

SETTING = (
    "In System Settings > Privacy & Security > Local Network, switch on mtp-cluster for a service, or else the app "
    "that started the program, such as Terminal. A program that outlives its Terminal or ssh session, as with nohup, "
    "loses the permission: use service install (docs/macs.md)"
)


def refusal(
    platform: str, number: int, host: str, networks: Sequence[ipaddress.IPv4Network], answers: bool | None = None
) -> str:
    """Return the advice if macOS, which refuses only hosts of its own `networks`, refused `host` with errno `number`.

    `answers` is the result of a ping, None if there was none. Other causes give an empty string.
    """
    if platform != "darwin" or number != NO_ROUTE_NUMBER or answers is False or not _is_local(host, networks):
        return ""
    return f"{REFUSES}{'' if answers else ', unless that machine is off'}. {SETTING}"


def _is_local(host: str, networks: Sequence[ipaddress.IPv4Network]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").endswith(".local")
    return address.is_link_local or any(address in network for network in networks)


def advice(text: str, host: str) -> str:
    """Return the advice if macOS refused this program a connection to `host`, which failed with `text`; else empty."""
    return refusal(sys.platform, NO_ROUTE_NUMBER, host, own_networks()) if NO_ROUTE in text else ""


def with_advice(text: str, host: str) -> str:
    """Return `text` of a failed connection to `host` with `advice`."""
    return ". ".join(filter(None, (text, advice(text, host))))


def own_networks() -> list[ipaddress.IPv4Network]:
    """Return the IPv4 networks of this machine, without loopback."""
    import psutil  # here, since commands import this file and need the networks after a failure only

    return [
        ipaddress.IPv4Network(f"{entry.address}/{entry.netmask}", strict=False)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family.name == "AF_INET" and entry.netmask
        if not ipaddress.ip_address(entry.address).is_loopback
    ]
