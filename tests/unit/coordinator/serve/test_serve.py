"""A server that stops while it starts, and the worker that it runs."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.serve import own_worker, server
from coordinator.serve.options import ServeOptions
from coordinator.serve.own_worker import OwnWorker
from coordinator.serve.served_parts import OpenedModel
from coordinator.serve.server import _run
from mtp.builtin import checkpoint_dir
from mtp.head.draft_vocabulary import DraftVocabulary
from proto.errors import CheckpointError
from proto.stage_options import StageOptions
from tests.support.processes.waits import until


async def test_a_stop_while_the_first_plan_gets_ready_is_no_error() -> None:
    """SIGTERM closes the listener while the plan is loading. A plan that serves a moment later is no error."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = asyncio.Event()

    async def serve(sockets: list[socket.socket]) -> None:
        sockets[0].close()  # as uvicorn does first
        stopped.set()
        await asyncio.sleep(0.01)  # its connections end

    server: Any = SimpleNamespace(serve=serve, should_exit=False)

    async def start() -> None:
        await stopped.wait()

    async with asyncio.timeout(10):
        await _run(server, "http://127.0.0.1:1", listener, start(), "m")


def test_the_files_of_the_model_are_opened_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """HTTP answers while a slow disk delivers the tokenizer and the headers."""
    threads = []

    def open_model(*_: object) -> NoReturn:
        """Refuse the model."""
        threads.append(threading.current_thread())
        raise CheckpointError("model: damaged. Download it again.")

    monkeypatch.setattr(server, "OpenedModel", open_model)
    command = ["serve", "--model", "builtin", "--single-node", "--port", "0"]
    result = CliRunner().invoke(app, [*command, "--state-dir", str(tmp_path)])
    assert result.exit_code
    (thread,) = threads
    assert thread is not threading.main_thread()


def test_the_options_of_a_model_reach_its_stages_and_requests(tmp_path: Path) -> None:
    """Stages get the types and the part of the vocabulary for drafts, and requests the rule of acceptance."""
    options = ServeOptions(
        "builtin",
        acceptance="ratio",
        draft_vocab=DraftVocabulary(640),
        dtype="float16",
        kv_bits=8,
        state_dir=tmp_path,
    )
    model = OpenedModel(options, checkpoint_dir())
    assert model.info.defaults.acceptance == "ratio"
    part = model.stage_options.draft_vocab
    assert 640 <= int.from_bytes(part).bit_count() < 800
    assert model.stage_options == StageOptions("float16", 8, draft_vocab=part)
    assert model.local.model.options == model.stage_options


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
