"""`mtp-worker` with an engine whose faults a test controls through a file. Runs as a program instead of `worker.cli`.

`MTP_TEST_FAULT` names the file. The worker reads it before every frame and every load. `stuck` blocks the engine
thread and `hang` blocks the next load, until the file changes. `slow 1.5` delays each frame by 1.5 seconds.

`MTP_TEST_ARITHMETIC` is the arithmetic that the worker claims to have.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mtp.device import Arithmetic
from proto.frame import Frame
from proto.frame_stamps import FrameStamps
from tests.support.processes.moved_clock import follow_moved_clock
from tests.support.processes.task_count import answer_for_tasks
from worker import cli
from worker.engine.frame_engine import BegunFrame, FrameEngine
from worker.model.loader import load_stage

FAULT, ARITHMETIC = "MTP_TEST_FAULT", "MTP_TEST_ARITHMETIC"

PART_SECONDS = 1.0
"""Seconds. Longest load of one part here, where checkpoints are small."""


def fault() -> list[str]:
    """Return the words of the fault file, or none if there is no file."""
    try:
        return Path(os.environ.get(FAULT, "")).read_text().split()
    except OSError:  # no file, or no free descriptor
        return []


def wait_while(name: str) -> None:
    """Block while the fault file says `name`."""
    while fault() == [name]:
        time.sleep(0.02)


def main() -> None:
    """Run `mtp-worker` with faulty frames and loads."""
    answer_for_tasks()
    follow_moved_clock()
    begin, rounding = FrameEngine.begin_frame, os.environ.get(ARITHMETIC) or str(Arithmetic.here())

    def faulty_begin(self: FrameEngine, frame: Frame, stamps: FrameStamps) -> BegunFrame:
        """Begin `frame` with the current fault."""
        wait_while("stuck")
        match fault():
            case ["slow", seconds]:
                time.sleep(float(seconds))
        return begin(self, frame, stamps)

    def faulty_load(*args: Any, **options: Any) -> Any:
        """Load a stage with the current fault."""
        wait_while("hang")
        return load_stage(*args, **options)

    with (
        patch.object(FrameEngine, "begin_frame", faulty_begin),
        patch("worker.engine.host.load_stage", faulty_load),
        patch("worker.engine.host.PART_SECONDS", PART_SECONDS),
        patch.object(Arithmetic, "__str__", lambda _: rounding),
    ):
        cli.main()
