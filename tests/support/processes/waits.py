"""Waits of tests for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds. Limit on waits that end soon on an idle machine; large, because test machines are shared."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true. Raises AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: never"
        time.sleep(0.02)


async def until(condition: Callable[[], object], what: str = "it") -> None:
    """Wait on the event loop until `condition()` is true. Raises AssertionError with `what` after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: never"
        await asyncio.sleep(0.01)
