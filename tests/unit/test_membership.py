"""Workers that come and go, told by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from coordinator.cluster.membership import Membership
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.view import Settings, View
from proto import cluster_pb2 as pb


class Leaving:
    """A client of a worker that drains, and is slow to answer its Unload."""

    closed = False

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def unload(self, epoch: int) -> None:
        self.asked.set()
        await asyncio.sleep(60)

    async def close(self) -> None:
        self.closed = True


async def test_the_end_amid_a_farewell() -> None:
    """A coordinator that ends while a worker leaves stops its heartbeats: they would hold the worker's claim, and the
    worker would wait to be let go for as long as it may."""
    options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings())
    unused: Any = SimpleNamespace()
    membership = Membership(unused, options, lambda: View(Settings()), print, print)
    leaving: Any = Leaving()
    membership.clients["a"] = leaving
    membership._leaves("a")
    async with asyncio.timeout(10):
        await leaving.asked.wait()
        await membership.close()
    assert leaving.closed
