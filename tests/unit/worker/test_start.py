"""Errors that stop a worker are reported before it listens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mtp.builtin import checkpoint_dir
from proto.errors import CheckpointError, SpanError, UsageError
from proto.span import Span
from worker.node.options import WorkerOptions
from worker.node.process import run


async def start(monkeypatch: pytest.MonkeyPatch, model: Path, layers: Span | None) -> None:
    """Run a worker of `model` that would fail, were it to listen."""

    def listens(*arguments: Any) -> Any:
        raise AssertionError("it would listen")

    monkeypatch.setattr("worker.node.process.bind_listener", listens)
    options = WorkerOptions("127.0.0.1", 0, "w", layers, model, 2**30, mdns=False, state_dir=None)
    async with asyncio.timeout(60):
        await run(options)


async def test_layers_that_its_own_model_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that the model does not have end with status 2, and the error names the flag and the layers."""
    with pytest.raises(SpanError, match=r"--layers 0-31: the model has 8 layers, 0-7") as raised:
        await start(monkeypatch, checkpoint_dir(), Span(0, 32))
    assert raised.value.exit_code == 2


async def test_an_own_model_of_another_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unsupported model ends with status 2, and the error names the file and its content."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UsageError, match=r"config\.json.*llama") as raised:
        await start(monkeypatch, tmp_path, None)
    assert isinstance(raised.value, CheckpointError)
    assert raised.value.exit_code == 2
