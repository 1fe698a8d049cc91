"""Disks with little space, for tests of full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[Path]:
    """Mount a disk of `size` at `path`. Skip the test if this user may not."""
    path.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield path
    finally:
        # Lazy, because a thread or an error may still hold a file open.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class ClaimedFreeSpace(NamedTuple):
    """A disk usage that claims free space. It simulates a disk that others fill after the check."""

    free: int = 2**40
