"""`mtp-worker`, whose engine does what a file says: run as a program of its own, in place of `worker.cli`.

`MTP_TEST_FAULT` names the file. Its text is read before every frame and every load: `stuck` blocks the engine thread,
`hang` the next load, both for as long as the file says so; `slow 1.5` makes a frame take so many seconds more,
`raise` fails it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from proto.frame import Frame
from tests.support.processes.task_count import answer_for_tasks
from worker import cli
from worker.engine.stage_engine import StageEngine
from worker.model.loader import load_stage

FAULT = "MTP_TEST_FAULT"

PART_SECONDS = 1.0
"""What one part of a load may take here, where the checkpoints are small."""


def fault() -> list[str]:
    file = Path(os.environ[FAULT])
    return file.read_text().split() if file.exists() else []


def wait_while(name: str) -> None:
    while fault() == [name]:
        time.sleep(0.02)


def main() -> None:
    answer_for_tasks()
    process = StageEngine.process

    def faulty_process(self: StageEngine, frame: Frame) -> Frame:
        wait_while("stuck")
        match fault():
            case ["slow", seconds]:
                time.sleep(float(seconds))
            case ["raise"]:
                raise RuntimeError("a test wants this engine to fail")
        return process(self, frame)

    def faulty_load(*args: Any, **options: Any) -> Any:
        wait_while("hang")
        return load_stage(*args, **options)

    with (
        patch.object(StageEngine, "process", faulty_process),
        patch("worker.node.loading.load_stage", faulty_load),
        patch("worker.node.loading.PART_SECONDS", PART_SECONDS),
    ):
        cli.main()
