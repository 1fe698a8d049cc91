"""The keeper of the own worker: the process starts again after every kind of failure."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from coordinator.serve import own_worker
from coordinator.serve.own_worker import OwnWorker
from tests.support.processes.waits import until


@pytest.mark.parametrize("problem", ["no log", "no program"])
async def test_a_start_that_fails_is_tried_again(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each failure is logged with its cause. The worker starts when the cause is gone."""
    program, folder = tmp_path / "program", tmp_path / "logs"
    monkeypatch.setattr(own_worker, "PROGRAM", (str(program),))
    monkeypatch.setattr(own_worker, "FIRST_PAUSE", 0.01)
    started = tmp_path / "started"
    if problem == "no log":
        folder.touch()
    own = OwnWorker("127.0.0.1:1", (), folder / "own-worker.log")

    def failures() -> list[str]:
        return [str(r.__dict__["error"]) for r in caplog.records if "error" in r.__dict__]

    text = f"#!/bin/sh\ntouch {started}\nread line\n"
    if problem == "no log":
        program.write_text(text)
        program.chmod(0o755)
    async with own.running():
        await until(lambda: len(failures()) > 1, "a second failure")
        assert ("File exists" if problem == "no log" else "No such file") in failures()[0]
        if problem == "no log":
            os.unlink(folder)
        else:
            program.write_text(text)
            program.chmod(0o755)
        await until(started.exists, "the start")
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "own worker"]
