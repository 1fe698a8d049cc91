"""The threads that use MLX."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import mlx.core as mx
import psutil

from worker.engine.engine_thread import EngineThread


async def use_an_engine() -> weakref.ref[EngineThread]:
    """Compute on a new engine thread, and end it."""
    thread = EngineThread()
    await thread.call(lambda: mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8))))
    await thread.close()
    assert not thread.alive
    return weakref.ref(thread)


async def use_six_engines() -> None:
    """Assert that six engines, one after the other, need the threads of one.

    Each with its own would have two more. A thread of a library may begin or end meanwhile, late on a busy machine.
    """
    await use_an_engine()
    before = psutil.Process().num_threads()
    ended = [await use_an_engine() for _ in range(5)]
    assert abs(psutil.Process().num_threads() - before) < len(ended)
    gc.collect()
    assert [one() for one in ended] == [None] * 5


def test_engines_of_a_process_share_its_threads() -> None:
    """MLX keeps a thread of its own for each thread that has computed, so later engines use the first one's.

    They run in a process of their own, because threads of earlier tests may begin and end here.
    """
    program = (
        f"import asyncio; from {__name__} import use_six_engines; asyncio.run(use_six_engines())"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
