"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_checkpoint

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
