"""The messages of a load to the coordinator, which also tell it that the load is alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from proto import cluster_pb2 as pb

REPEAT_SECONDS = 20.0
"""Seconds without progress after which the newest message is sent again. A load compiles kernels for up to a minute.
A coordinator ends a load that says nothing for two. The watchdog of the engine thread bounds the load itself."""


async def repeat_progress(
    progress: asyncio.Queue[pb.LoadProgress],
) -> AsyncIterator[pb.LoadProgress]:
    """Yield the messages up to an empty one. Repeat the newest when no other comes for `REPEAT_SECONDS`."""
    newest = pb.LoadProgress(progress=pb.LoadBytes())
    while True:
        with suppress(TimeoutError):
            newest = await asyncio.wait_for(progress.get(), REPEAT_SECONDS)
        if not newest.WhichOneof("body"):
            return
        yield newest
