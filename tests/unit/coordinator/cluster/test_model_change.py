"""A change of the model while workers are described and join: what the cluster knows of them is about the new model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.events import Event, apply
from coordinator.cluster.membership import ManagerOptions, Membership
from coordinator.cluster.view import Member, MemberState, Settings, View
from proto import cluster_pb2 as pb
from tests.support.processes.stub_worker import StubMember, stub_members
from tests.support.processes.waits import until

OLD, NEW = "0" * 64, "1" * 64


def model(fingerprint: str, *, can_provide: bool = True) -> Any:
    """Return a model, whose weights the coordinator can provide or not."""
    return SimpleNamespace(
        exact=False,
        checkpoint=SimpleNamespace(config=SimpleNamespace(num_layers=8)),
        ref=pb.ModelRef(name="m", fingerprint=fingerprint),
        provider=SimpleNamespace(can_provide=can_provide),
    )


class Cluster:
    """A membership over real connections, whose events change a view as in the manager."""

    def __init__(self, *workers: StubMember) -> None:
        addresses = tuple(worker.address for worker in workers)
        options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings(), addresses)
        self.view = View(Settings())
        self.membership = Membership(
            model(OLD), options, lambda: self.view, self._apply, lambda address, status: None
        )

    def _apply(self, event: Event) -> None:
        self.view = apply(self.view, event, time.monotonic())

    async def change_to(self, new: Any) -> None:
        """Change the model as the manager does."""
        self.membership.change_model(new, await self.membership.describe_for(new))

    async def member(self, worker: StubMember, state: MemberState = MemberState.READY) -> Member:
        """Wait until `worker` has this state, and return it."""
        await until(lambda: self.state(worker) is state)
        return self.view.members[worker.address]

    def state(self, worker: StubMember) -> MemberState | None:
        found = self.view.members.get(worker.address)
        return None if found is None else found.state


@pytest.fixture
def workers() -> Iterator[tuple[StubMember, StubMember]]:
    """Run two workers with the files of the old model."""
    first, second = StubMember("first", OLD), StubMember("second", OLD)
    with stub_members(first, second):
        yield first, second


@asynccontextmanager
async def running(*workers: StubMember) -> AsyncIterator[Cluster]:
    cluster = Cluster(*workers)
    cluster.membership.start()
    try:
        yield cluster
    finally:
        await cluster.membership.close()


async def test_a_description_in_flight_is_not_used_for_the_new_model(
    workers: tuple[StubMember, StubMember],
) -> None:
    """It says that the worker has the files of the old model. The worker is asked again."""
    worker, _ = workers
    worker.may_answer.clear()
    async with running(worker) as cluster:
        await until(lambda: worker.described > 0)
        await cluster.change_to(model(NEW))
        worker.may_answer.set()
        assert not (await cluster.member(worker)).has_files
        assert worker.described > 1


async def test_a_worker_that_joins_during_the_change_is_described_for_the_new_model(
    workers: tuple[StubMember, StubMember],
) -> None:
    """It is admitted for the old model while the first worker has not answered for the new one."""
    first, second = workers
    second.may_answer.clear()
    async with running(first, second) as cluster:
        await cluster.member(first)
        asked = first.described
        first.may_answer.clear()
        change = asyncio.create_task(cluster.change_to(model(NEW)))
        await until(lambda: first.described > asked)
        second.may_answer.set()
        assert (await cluster.member(second)).has_files
        first.may_answer.set()
        await change
        assert not (await cluster.member(first)).has_files
        assert not (await cluster.member(second)).has_files


async def test_a_worker_without_a_status_joins_for_the_new_model(
    workers: tuple[StubMember, StubMember],
) -> None:
    """A worker that is watched joins with its first status, and with the description for the new model."""
    worker, _ = workers
    worker.may_report.clear()
    async with running(worker) as cluster:
        await until(lambda: worker.watchers == 1)
        await cluster.change_to(model(NEW))
        assert cluster.state(worker) is None
        worker.may_report.set()
        assert not (await cluster.member(worker)).has_files


async def test_a_refused_worker_without_a_status_is_not_watched_any_more(
    workers: tuple[StubMember, StubMember],
) -> None:
    """Its connection ends, so that its heartbeats do not hold it back from other coordinators."""
    worker, _ = workers
    worker.may_report.clear()
    async with running(worker) as cluster:
        await until(lambda: worker.watchers == 1)
        await cluster.change_to(model(NEW, can_provide=False))
        worker.may_report.set()
        await until(lambda: worker.watchers == 0)
        refused = await cluster.member(worker, MemberState.REFUSED)
        assert "has no copy of the model" in refused.reason
