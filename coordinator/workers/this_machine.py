"""Detection of workers that run on the coordinator's own machine."""

from __future__ import annotations

import psutil

from proto.address import is_loopback, parse_address


def on_this_machine(address: str) -> bool:
    """Return whether the host of `HOST:PORT` is loopback or an address of one of this machine's interfaces."""
    host, _ = parse_address("--worker", address)
    if is_loopback(host):
        return True
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return host in own
