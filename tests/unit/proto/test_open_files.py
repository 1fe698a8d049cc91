"""The limit on open files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from proto.terminal.console import WANTED, raise_open_file_limit

INFINITE = resource.RLIM_INFINITY


class FakeLimits:
    """The soft and the hard limit of a process. The system refuses soft limits above `ceiling`."""

    def __init__(self, patch: pytest.MonkeyPatch, soft: int, hard: int, ceiling: int) -> None:
        self.soft, self.hard, self.ceiling = soft, hard, ceiling
        patch.setattr(resource, "getrlimit", lambda which: (self.soft, self.hard))
        patch.setattr(resource, "setrlimit", self.set)

    def set(self, which: int, limits: tuple[int, int]) -> None:
        """Change the limits, as `resource.setrlimit` does."""
        if limits[0] > self.ceiling or limits[1] != self.hard:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = limits[0]


@pytest.mark.parametrize(
    ("soft", "hard", "ceiling", "expected"),
    [
        (256, INFINITE, 10**9, WANTED),  # launchd on macOS
        (1024, 4096, 10**9, 4096),
        (2**20, 2**20, 2**20, 2**20),
        (INFINITE, INFINITE, 10**9, INFINITE),
        (256, INFINITE, 1000, 256),  # kern.maxfilesperproc
    ],
)
def test_the_limit_is_raised_as_far_as_permitted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, ceiling: int, expected: int
) -> None:
    """The soft limit becomes WANTED or the hard limit, is never lowered, and a refusal is no error."""
    limits = FakeLimits(monkeypatch, soft, hard, ceiling)
    raise_open_file_limit()
    assert limits.soft == expected


IMPORT = """
import resource, sys
from proto.terminal.console import keep_open_file_limit
keep_open_file_limit()
sys.modules["torch"] = None
import mlx_lm.utils
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_mlx_lm_leaves_the_limit() -> None:
    """mlx-lm can be imported under a low hard limit, which stays. Other limits can be changed."""
    command = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "(256, 256) (0, 0)\n", done.stderr
