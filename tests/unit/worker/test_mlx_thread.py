"""The threads that use MLX."""

from __future__ import annotations

import gc
import weakref

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


async def test_engines_of_a_process_share_its_threads() -> None:
    """MLX keeps a thread of its own for each thread that has computed, so later engines use the first one's."""
    await use_an_engine()
    before = psutil.Process().num_threads()
    ended = [await use_an_engine() for _ in range(5)]
    assert psutil.Process().num_threads() == before
    gc.collect()
    assert [one() for one in ended] == [None] * 5
