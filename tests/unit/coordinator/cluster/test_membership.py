"""Workers that come and go, told by hand."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.membership import Membership
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.view import Settings, View
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.announcement import Announcement
from proto.errors import ClusterError, VersionError, WorkerLostError


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
    membership._record_draining("a")
    async with asyncio.timeout(10):
        await leaving.asked.wait()
        await membership.close()
    assert leaving.closed


@pytest.mark.parametrize("named", [True, False])
def test_who_is_no_worker_is_said_once(named: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Until the reason is another. That nobody answers is a warning where the user named the address; mDNS goes on
    about who has left. An answer that is no worker's of this release is one anywhere."""
    options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings())
    unused: Any = SimpleNamespace()
    membership = Membership(unused, options, lambda: View(Settings()), print, print)
    heard = None if named else Announcement("id", "mac-2", 7000)
    candidate = Candidate("a:7000", ("a:7000",), heard)
    errors: list[ClusterError] = [WorkerLostError("refused"), VersionError("version 2")]
    with caplog.at_level(logging.DEBUG):
        for error in (errors[0], errors[0], errors[1], errors[1]):
            membership._record_silence(candidate, "a:7000", error)
    levels = [record.levelname for record in caplog.records if record.message == "no worker"]
    assert levels == ["WARNING" if named else "DEBUG", "WARNING"]
