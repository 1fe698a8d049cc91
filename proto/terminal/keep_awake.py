"""Keeping a Mac awake while a program serves, by means of macOS's `caffeinate`."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0
"""Seconds. Longest wait for `caffeinate` to end. It also ends by itself when this process has ended."""


@contextlib.contextmanager
def keep_awake(*, enabled: bool = True) -> Iterator[None]:
    """Prevent sleep on macOS inside the block. Do nothing on other systems, or with `enabled` False.

    A sleeping Mac stops answering in the middle of a stream, and the coordinator then plans without it.
    """
    process = _start() if enabled and sys.platform == "darwin" else None
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)


def _start() -> subprocess.Popen[bytes] | None:
    """Start `caffeinate` for as long as this process lives."""
    command = ["caffeinate", "-i", "-s", "-w", str(os.getpid())]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        log.warning("this Mac may fall asleep: caffeinate cannot run", extra={"error": str(error)})
        return None
    log.debug("this Mac stays awake while it serves", extra={"caffeinate": process.pid})
    return process
