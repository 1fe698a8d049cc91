"""The queue of a stage's engine: it is bounded by the frames of a correct sender."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from proto.control import Cancel, Rollback, Signal
from proto.errors import ProtocolError
from proto.frame_stamps import FrameStamps, StageStep
from worker.engine.deadline import DeadlineEstimate
from worker.node import binding
from worker.node.binding import MAX_QUEUED_FRAMES, Binding, Machinery, Place, Traffic


@pytest.fixture
async def bound() -> Binding:
    """Return a binding over an engine thread that does nothing."""
    thread: Any = MagicMock(queued=0)
    machinery = Machinery(thread, DeadlineEstimate(), Traffic())
    return Binding(Place(1, 0, 1, b"token"), machinery, lambda: None)


async def test_frames_are_counted(bound: Binding) -> None:
    """The number of queued frames is bounded; signals do not count."""
    for _ in range(2 * MAX_QUEUED_FRAMES):
        bound.apply_signal(Signal(1, Cancel(0)))
    for _ in range(MAX_QUEUED_FRAMES):
        bound.enqueue_frame(b"frame")
    with pytest.raises(ProtocolError, match=f"{MAX_QUEUED_FRAMES} frames"):
        bound.enqueue_frame(b"frame")


async def test_bytes_are_counted(bound: Binding) -> None:
    """The bytes of queued frames are bounded; frames that the engine has started do not count."""
    with patch.object(binding, "MAX_QUEUED_BYTES", 100):
        bound.enqueue_frame(b"x" * 60)
        with pytest.raises(ProtocolError, match="60 bytes"):
            bound.enqueue_frame(b"x" * 60)
        bound._process(b"x" * 60, FrameStamps(0, StageStep))  # the engine has it
        bound.enqueue_frame(b"x" * 60)


async def test_a_signal_that_breaks_the_engine() -> None:
    """An error in a rollback, such as a lack of memory, ends the plan, but not the thread that the next plan needs."""
    failed = asyncio.Event()
    machinery = Machinery()
    bound = Binding(Place(1, 0, 1, b"token"), machinery, failed.set)
    bound.engine = MagicMock()
    bound.engine.rollback.side_effect = MemoryError("none left")
    bound.apply_signal(Signal(1, Rollback(0, 0, 0, 1)))
    async with asyncio.timeout(20):
        await failed.wait()
        assert await machinery.thread.call(lambda: "well") == "well"
        await machinery.thread.close()
    assert bound.fault is not None and "none left" in bound.fault.message
