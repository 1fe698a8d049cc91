"""Announcement by macOS's own mDNS responder."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from proto.announcement import Announcement
from tests.support.processes.waits import until
from worker.node import announce


async def test_a_worker_is_announced_by_the_system_s_responder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS `dns-sd` announces the worker if this process cannot use the mDNS port."""

    def port_in_use(*_: object, **__: object) -> None:
        raise OSError(48, "Address already in use")

    said, program = tmp_path / "said", tmp_path / "dns-sd"
    text = f'printf "%s|" "$@" > {said}.new && mv {said}.new {said}'
    program.write_text(f"#!/bin/sh\n{text}\nexec sleep 60\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(announce, "AsyncZeroconf", port_in_use)
    monkeypatch.setattr("sys.platform", "darwin")
    announcement = Announcement("0a1b2c3d4e5f6071", "mac-2", 50505)
    async with asyncio.timeout(60), announce.announced(announcement, "127.0.0.1"):
        await until(lambda: said.exists())
    assert said.read_text() == (
        "-R|mac-2-0a1b2c3d|_mtp-worker._tcp|local.|50505|id=0a1b2c3d4e5f6071|name=mac-2|"
    )
