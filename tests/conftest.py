"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from proto.terminal.logs import OURS
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.hub import Hub

Checkpoints = Callable[..., Path]

# The tests compare results bit for bit, which only MLX's CPU backend guarantees. The variable reaches the processes
# that tests start. `tests/parity/test_gpu.py` has the tests with tolerances for a GPU.
os.environ["MTP_DEVICE"] = "cpu"
# No test reads or writes the keys and certificates of the user who runs it.
os.environ["MTP_STATE_DIR"] = tempfile.mkdtemp(prefix="mtp-state-")
mx.set_default_device(mx.Device(mx.cpu))
# A shell starts background jobs with Ctrl-C ignored, and children inherit that. Some tests send Ctrl-C to children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function that writes a checkpoint and returns its directory.

    `checkpoints(moe=True, …)` takes the arguments of `write_checkpoint`. Equal arguments give the same directory for
    the whole session, so tests only read it. A test that edits files writes its own checkpoint.
    """
    written: dict[str, Path] = {}

    def get(**options: Any) -> Path:
        """Return the directory of the checkpoint with these options."""
        key = repr(sorted(options.items()))
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **options)
        return written[key]

    return get


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Yield a hub without repos that this process uses, with a cache in the folder `home` of the test."""
    with Hub() as hub:
        hub.install(monkeypatch, tmp_path / "home")
        monkeypatch.setattr("mtp.checkpoint.hub.repo.FIRST_PAUSE", 0.001)
        yield hub


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Restore the logging configuration after each test.

    A command that runs in the test process configures all loggers. Without this fixture, later tests would not capture
    the records they check.
    """
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {n: logging.getLogger(n).level for n in ("", *OURS)}
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
