"""A wall clock that a test moves through a file, for a process that runs as a program.

`MTP_TEST_CLOCK` names the file. It has the seconds by which `time.time` and `time.time_ns` are wrong. Times of log
records stay right, because tests compare them. Clocks in C, such as those of SQLite, do not move.
"""

from __future__ import annotations

import logging
import os
import time
import types
from pathlib import Path

CLOCK = "MTP_TEST_CLOCK"

right_time, right_time_ns = time.time, time.time_ns


def offset() -> float:
    """Return the seconds in the file, or zero without a file."""
    try:
        return float(Path(os.environ[CLOCK]).read_text())
    except (OSError, ValueError):
        return 0.0


def follow_moved_clock() -> None:
    """Let the wall clock of this process follow the file, if the environment names one."""
    if CLOCK not in os.environ:
        return
    right = types.ModuleType("time")
    right.__dict__.update(vars(time))
    vars(logging)["time"] = right
    time.time = lambda: right_time() + offset()
    time.time_ns = lambda: right_time_ns() + round(1e9 * offset())
