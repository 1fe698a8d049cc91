"""HOST:PORT of a worker, as users write it."""

from __future__ import annotations

from proto.errors import UsageError


def parse_address(text: str) -> str:
    """`text` as gRPC takes it: `host:port`, with an IPv6 host in brackets. Raises UsageError."""
    host, _, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    malformed = not bare or any(c.isspace() or c in "/,@[]" for c in bare)
    if malformed or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        raise UsageError(f"--worker {text!r:.100}: write HOST:PORT, as in 192.168.1.7:50505")
    return join_address(bare, int(port))


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
