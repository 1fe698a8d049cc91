"""Discovery and announcement by macOS's own mDNS responder, on recorded outputs of `dns-sd`."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.cluster import discovery
from coordinator.cluster.discovery import Discovery, ServiceRecord, parse_zone
from proto.announcement import Announcement
from tests.support.processes.waits import until
from worker.node import announce

ZONE = r"""Browsing for _mtp-worker._tcp.local.
DATE: ---Sat 21 Nov 2026---
10:33:28.123  ...STARTING...

; To direct clients to browse a different domain, substitute that domain in place of '@'
lb._dns-sd._udp                                 PTR     @

_mtp-worker._tcp                                PTR     mac\0322-0a1b2c3d._mtp-worker._tcp
mac\0322-0a1b2c3d._mtp-worker._tcp              SRV     0 0 50505 localhost. ; Replace with unicast FQDN of target host
mac\0322-0a1b2c3d._mtp-worker._tcp              TXT     "v=3" "id=0a1b2c3d4e5f6071" "name=mac\0322" "layers=0-3"
"""

RECORD = ServiceRecord(
    r"mac\0322-0a1b2c3d._mtp-worker._tcp",
    "localhost",
    50505,
    {b"v": b"3", b"id": b"0a1b2c3d4e5f6071", b"name": b"mac 2", b"layers": b"0-3"},
)

Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a fake `dns-sd` with this shell text. Its arguments go to the returned file."""
    said = tmp_path / "said"

    def write(text: str) -> Path:
        program = tmp_path / "dns-sd"
        program.write_text(
            f'#!/bin/sh\nprintf "%s|" "$@" > {said}.new && mv {said}.new {said}\n{text}\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        return said

    return write


def printing(tmp_path: Path) -> str:
    """Return shell text that prints ZONE and then runs on, as `dns-sd` does."""
    (tmp_path / "zone").write_text(ZONE)
    return f"cat {tmp_path}/zone\nexec sleep 60"


def test_a_recorded_zone_is_read() -> None:
    """Instance, host, port and TXT entries come from the SRV and TXT lines, with escapes decoded."""
    assert parse_zone(ZONE) == [RECORD]
    assert parse_zone("") == parse_zone("nonsense\nx TXT") == []


async def test_discovery_falls_back_to_the_system_s_responder(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS a worker is found through `dns-sd` if this process cannot use the mDNS port."""

    def port_in_use(*_: object, **__: object) -> None:
        raise OSError(48, "Address already in use")

    install(printing(tmp_path))
    monkeypatch.setattr(discovery, "AsyncZeroconf", port_in_use)
    monkeypatch.setattr("coordinator.cluster.discovery.SCAN_SECONDS", 0.3)
    monkeypatch.setattr("sys.platform", "darwin")
    async with asyncio.timeout(60), Discovery() as found:
        await until(lambda: bool(found.candidates()))
        (candidate,) = found.candidates()
    assert candidate.name == "mac 2"
    assert candidate.addresses == ("127.0.0.1:50505",)
    assert candidate.announcement is not None
    assert candidate.announcement.worker_id == "0a1b2c3d4e5f6071"


async def test_a_worker_is_announced_by_the_system_s_responder(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS `dns-sd` announces the worker if this process cannot use the mDNS port."""

    def port_in_use(*_: object, **__: object) -> None:
        raise OSError(48, "Address already in use")

    said = install("exec sleep 60")
    monkeypatch.setattr(announce, "AsyncZeroconf", port_in_use)
    monkeypatch.setattr("sys.platform", "darwin")
    announcement = Announcement("0a1b2c3d4e5f6071", "mac-2", 50505)
    async with asyncio.timeout(60), announce.announced(announcement, "127.0.0.1"):
        await until(lambda: said.exists())
    assert said.read_text() == (
        "-R|mac-2-0a1b2c3d|_mtp-worker._tcp|local.|50505|id=0a1b2c3d4e5f6071|name=mac-2|"
    )
