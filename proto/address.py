"""Network addresses as users write them: `HOST:PORT`, with an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress

from proto.errors import UsageError


def parse_address(flag: str, text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return host and port of `text`: `HOST:PORT` or `[v6]:PORT`.

    `default_port` permits `HOST`, `:PORT` (the loopback host) and port 0. Raises UsageError that names `flag`.
    """
    host, colon, port = text.strip().rpartition(":")
    if default_port is not None:
        if not colon or text.strip().endswith("]"):
            host, port = text.strip(), str(default_port)
        host = host or "127.0.0.1"
    bare = host.removeprefix("[").removesuffix("]")
    malformed = not bare or any(c.isspace() or c in "/,@[]" for c in bare)
    lowest = 1 if default_port is None else 0
    number = int(port[:6]) if port.isascii() and port.isdigit() else -1
    if malformed or not lowest <= number < 65536:
        example = f"127.0.0.1:{default_port}" if default_port else "192.168.1.7:50505"
        raise UsageError(f"{flag} {text!r:.100}: write HOST:PORT, as in {example}")
    if bare.isdigit() and not colon:
        raise UsageError(
            f"{flag} {text!r:.100} has no host. Write HOST:PORT, as in 127.0.0.1:{bare}"
        )
    return bare, number


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of `address`, which `join_address` made."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
