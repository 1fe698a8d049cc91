"""Where a process listens: addresses as people write them, and who can reach them. No I/O."""

from __future__ import annotations

import ipaddress

from proto.errors import UsageError


def parse_address(flag: str, text: str, default_port: int) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[v6]:PORT`, `HOST` or `:PORT`. Raises UsageError naming `flag`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    host = host.strip("[]") or "127.0.0.1"
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{flag} {text!r}: write HOST:PORT, as in 127.0.0.1:{default_port}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(flag: str, host: str, *, insecure: bool) -> None:
    """Raise UsageError for a listener others can reach, unless the user accepts that anyone may use it."""
    if not is_loopback(host) and not insecure:
        raise UsageError(
            f"{flag} {host} is open to the network, and connections are not encrypted yet: "
            "add --insecure if you trust everyone on it"
        )
