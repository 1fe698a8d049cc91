"""Discovery by macOS's own mDNS responder, for a Mac on which this process cannot use the mDNS port itself."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

SCAN_SECONDS = 3.0
"""Seconds. `dns-sd` never ends by itself, and a local answer takes about one."""

STOP_SECONDS = 2.0
"""Seconds. Longest wait for `dns-sd` to end."""

_SRV = re.compile(r"^(\S+)\s+SRV\s+\d+\s+\d+\s+(\d+)\s+(\S+?)\.?\s*(?:;.*)?$")
_TXT = re.compile(r"^(\S+)\s+TXT\s+(.*)$")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DECIMAL = re.compile(rb"\\(\d{3})")


@dataclass(frozen=True)
class ServiceRecord:
    """One announced service: its instance, host name, port and TXT record."""

    instance: str
    host: str
    port: int
    txt: dict[bytes, bytes | None]


async def scan(service: str, seconds: float = SCAN_SECONDS) -> list[ServiceRecord]:
    """Return the services of type `service`, such as `_http._tcp`, that answer within `seconds`.

    Raises OSError if the program `dns-sd` is missing.
    """
    process = await asyncio.create_subprocess_exec(
        "dns-sd",
        "-Z",
        service,
        "local.",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    reading = asyncio.create_task(process.stdout.read())
    try:
        await asyncio.wait({reading}, timeout=seconds)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                output = await reading
        except TimeoutError:
            process.kill()
            reading.cancel()
            output = b""
    return parse_zone(output.decode(errors="replace"))


def parse_zone(text: str) -> list[ServiceRecord]:
    """Return the services in the zone file that `dns-sd -Z` prints. Lines of other kinds are ignored."""
    places: dict[str, tuple[str, int]] = {}
    records: dict[str, dict[bytes, bytes | None]] = {}
    for line in text.splitlines():
        if srv := _SRV.match(line):
            places[srv[1]] = (srv[3], int(srv[2]))
        elif txt := _TXT.match(line):
            records[txt[1]] = _entries(txt[2])
    return [
        ServiceRecord(instance, host, port, records.get(instance, {}))
        for instance, (host, port) in places.items()
    ]


def _entries(text: str) -> dict[bytes, bytes | None]:
    """Return the quoted `key=value` strings of a TXT record. A key without `=` has the value None."""
    found: dict[bytes, bytes | None] = {}
    for quoted in _QUOTED.findall(text):
        raw = _DECIMAL.sub(lambda m: bytes([int(m[1]) % 256]), quoted.encode())
        key, equals, value = re.sub(rb"\\(.)", rb"\1", raw).partition(b"=")
        found[key] = value if equals else None
    return found
