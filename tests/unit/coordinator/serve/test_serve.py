"""The life of `mtp-coord serve`, without a model."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.serve import server
from coordinator.serve.server import _run
from proto.errors import CheckpointError


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
