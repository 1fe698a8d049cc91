"""What waits for a stage's engine: no more than a sender in its right mind has under way."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from proto.errors import ProtocolError
from proto.signal import Cancel, Signal
from worker import binding
from worker.allowance import Allowance
from worker.binding import MAX_QUEUED_FRAMES, Binding, Machinery, Place, Traffic


@pytest.fixture
async def bound() -> Binding:
    """Over an engine thread that does nothing."""
    thread: Any = MagicMock(queued=0)
    machinery = Machinery(thread, Allowance(), Traffic())
    return Binding(Place(1, 0, 1, b"token"), machinery, lambda: None)


async def test_frames_are_counted(bound: Binding) -> None:
    """So many may wait and no more; signals, which are work for the same thread, are none of them."""
    for _ in range(2 * MAX_QUEUED_FRAMES):
        bound.signal(Signal(1, Cancel(0)))
    for _ in range(MAX_QUEUED_FRAMES):
        bound.take(b"frame")
    with pytest.raises(ProtocolError, match=f"{MAX_QUEUED_FRAMES} frames"):
        bound.take(b"frame")


async def test_bytes_are_counted(bound: Binding) -> None:
    """A few large frames are as much as many small ones; what the engine has begun waits no more."""
    with patch.object(binding, "MAX_QUEUED_BYTES", 100):
        bound.take(b"x" * 60)
        with pytest.raises(ProtocolError, match="60 bytes"):
            bound.take(b"x" * 60)
        bound._begun(60)
        bound.take(b"x" * 60)
