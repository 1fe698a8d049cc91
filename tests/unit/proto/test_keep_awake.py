"""Keeping a Mac awake."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil
import pytest

from proto.terminal.console import keep_awake
from tests.support.processes.waits import wait_until


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake `caffeinate` on a pretended Mac. It writes its process id and arguments to the returned file."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "caffeinate"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$$ $@" > {said}.new && mv {said}.new {said}\nexec sleep 60\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.platform", "darwin")
    return said


def test_caffeinate_runs_while_the_program_serves(caffeinate: Path) -> None:
    """Inside the block `caffeinate` holds an assertion for this process, and it has ended afterwards."""
    with keep_awake():
        wait_until(caffeinate.exists, "the start of caffeinate")
        pid, *arguments = caffeinate.read_text().split()
        assert arguments == ["-i", "-s", "-w", str(os.getpid())]
        assert psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(pid))


def test_a_mac_without_caffeinate_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing program is logged and does not stop the start."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("PATH", "/nonexistent")
    with keep_awake():
        pass
    assert "may fall asleep" in caplog.text
