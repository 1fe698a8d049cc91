"""A disk that is soon full."""

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
    """Mount one of `size` at `path`; skip the test where this user may not."""
    path.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield path
    finally:
        # Lazily: a thread or an error that still holds a file open is no matter of this test.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class Plenty(NamedTuple):
    """What a disk says of itself that others will fill a moment later."""

    free: int = 2**40
