"""Addresses of machines, and the mDNS record of a worker. The record is untrusted until a Describe call confirms it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from proto.errors import ProtocolError, UsageError


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
        raise UsageError(f"{flag} {text!r:.100} has no host. Write HOST:PORT, as in 127.0.0.1:{bare}")
    return bare, number


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of `address`, which `join_address` made."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


UNSPECIFIED = (str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0)))
"""The addresses that stand for every interface."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


JOIN_FLAG = "--join TOKEN, from mtp-coord token create"
"""The way into a cluster, for the messages of both programs."""

JOIN_PREFIX = "mtp1."
"""The first characters of a token."""

SERVICE_TYPE = "_mtp-worker._tcp.local."

_MAX_LABEL = 63
"""Maximum bytes of an instance name (RFC 6763)."""

_MAX_TEXT = 128
_TRUST_ID = re.compile("[0-9a-f]{16}")
"""A cluster id or node id, as in proto/trust/certificates.py."""


@dataclass(frozen=True)
class Announcement:
    """The TXT record and the port of the SRV record.

    `cluster` and `node` are those of the worker's certificate, empty without one; only the handshake verifies them.
    """

    worker_id: str
    name: str
    port: int
    cluster: str = ""
    node: str = ""

    @property
    def instance(self) -> str:
        """The full name of this service instance. It is readable, and unique to this process."""
        end = f"-{self.worker_id[:8]}"
        printable = "".join(c for c in self.name if c.isprintable()).encode(errors="ignore")
        start = printable[: _MAX_LABEL - len(end)].decode(errors="ignore")
        return f"{start}{end}.{SERVICE_TYPE}"

    def to_txt(self) -> dict[str, str]:
        """Return the TXT record of the announcement."""
        txt = {"id": self.worker_id, "name": self.name[: _MAX_TEXT // 4]}
        if self.cluster:
            txt["cluster"], txt["node"] = self.cluster, self.node
        return txt

    @classmethod
    def from_txt(cls, txt: Mapping[bytes, bytes | None], port: int | None) -> Announcement:
        """Invert `to_txt`, and ignore unknown keys. Raises ProtocolError for a missing or malformed value."""
        worker_id = _text(txt, b"id")
        if not worker_id:
            raise ProtocolError("mDNS announcement without a worker id")
        if port is None or not 0 < port < 65536:
            raise ProtocolError(f"mDNS announcement of port {port}")
        cluster, node = _text(txt, b"cluster"), _text(txt, b"node")
        if (cluster or node) and not (_TRUST_ID.fullmatch(cluster) and _TRUST_ID.fullmatch(node)):
            raise ProtocolError("mDNS announcement of a malformed cluster or node")
        return cls(worker_id, _text(txt, b"name") or worker_id, port, cluster, node)


def _text(txt: Mapping[bytes, bytes | None], key: bytes) -> str:
    """Return a value as printable text, or an empty string when the record has none."""
    value = (txt.get(key) or b"").decode(errors="replace")[:_MAX_TEXT]
    return "".join(c for c in value if c.isprintable())
