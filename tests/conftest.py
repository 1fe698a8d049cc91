"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proto.terminal.logs import OURS
from tests.support.checkpoints.checkpoints import write_checkpoint

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(moe=True, …)`: the directory of such a checkpoint, written once a session. Read only.

    Takes what `write_checkpoint` takes. A test that edits files writes a checkpoint of its own.
    """
    written: dict[str, Path] = {}

    def get(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **options)
        return written[key]

    return get


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Give the loggers back as they were: a command that a test runs in this process configures them all, and what the
    next test listens for would not be heard."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {n: logging.getLogger(n).level for n in ("", *OURS)}
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
