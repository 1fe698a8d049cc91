"""Listening sockets, with errors that name the flag and the addresses of this machine."""

from __future__ import annotations

import errno
import socket

import psutil

from proto.errors import UsageError


def bind_listener(flags: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port`; port 0 chooses a free one.

    Raises UsageError naming `flags`, the options as the user writes them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"{flags}: {_problem(error)}") from error
    return listener


def own_addresses() -> list[str]:
    """Return the IP addresses of this machine's interfaces, without link-local ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    found = {entry.address for entry in entries if entry.family in families}
    return sorted(a for a in found if "%" not in a and not a.startswith("fe80:"))


def _problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there. Choose another port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return "the system reserves this port. Choose one above 1023, or 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"not an address of this machine. Its addresses are {', '.join(own_addresses())}"
    return f"{error.strerror}. Choose another address"
