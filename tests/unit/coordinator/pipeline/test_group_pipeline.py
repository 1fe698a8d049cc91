"""A pipeline whose stages are groups."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.pipeline.remote_pipeline import RemotePipeline
from coordinator.planning.capacity import Capacity
from proto.errors import NotReadyError
from proto.span import Span

ROOM = Capacity(sequences=1, kv_tokens=1, prefix_bytes=0)


async def test_a_group_restores_no_backup() -> None:
    """A backup of a plan before has whole layers, so the answer is computed again instead."""
    unused: Any = object()
    pipeline = RemotePipeline([[unused, unused]], 1, ROOM, 3.0, [Span(0, 4)])
    assert not pipeline.makes_backups
    with pytest.raises(NotReadyError, match="restore no backup"):
        await pipeline.write_backup(0, (1, 2), ())
    assert RemotePipeline([[unused]], 1, ROOM, 3.0, [Span(0, 4)]).makes_backups
