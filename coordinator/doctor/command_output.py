"""The output of programs that belong to the operating system."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

SECONDS = 5.0
"""Seconds. Longest run of one program. All of them answer from memory."""

CommandOutput = Callable[..., str]
"""A function as `command_output`. Tests pass one that returns recorded outputs."""


def command_output(*command: str) -> str:
    """Return what `command` prints, or an empty string if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
