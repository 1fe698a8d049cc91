"""The effects of the manager. Its decisions are tested with `decide`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cluster import manager as manager_module
from coordinator.cluster.decide import Planner
from coordinator.cluster.events import (
    FORGET_SECONDS,
    Event,
    GroupMeasured,
    PlanServing,
    TimePassed,
    WorkerJoined,
    WorkerLost,
    apply,
)
from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.plan_start import PlanStart
from coordinator.cluster.view import Member, Phase, Settings, View
from coordinator.planning.plan import Plan, StagePlan
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, MemoryLimitError, NotReadyError, SpanError
from proto.span import Span
from proto.stage_options import StageOptions
from tests.support.protocol.cluster_walk import planner_for, worker


def manager_of(settings: Settings, planner: Planner | None = None) -> ClusterManager:
    """Return a manager whose machine serves nothing alone."""

    async def no_pipeline(epoch: int) -> Any:
        raise MemoryLimitError("this machine serves nothing alone in this test")

    plans = planner or planner_for(1)
    model: Any = SimpleNamespace(options=StageOptions(), planner=lambda: plans)
    options = ManagerOptions(pb.Coordinator(id="c", name="c"), settings)
    return ClusterManager(model, options, no_pipeline)


async def test_closing_causes_no_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends its stream during the close causes no new plan over the others."""

    async def serve(self: ClusterManager, plan: Plan) -> None:
        """Do nothing: the test itself reports that a plan serves."""

    monkeypatch.setattr(ClusterManager, "_serve", serve)
    manager = manager_of(Settings(nodes=2))
    for event in (WorkerJoined(worker("a")), WorkerJoined(worker("b")), PlanServing(1)):
        manager._apply_event(event)
    assert manager.view.phase is Phase.SERVING

    async def closes() -> None:
        manager._apply_event(WorkerLost("a", "its stream has ended"))

    monkeypatch.setattr(manager.membership, "close", closes)
    await manager.close()
    assert manager.view.epoch == 1


async def test_closing_closes_a_pipeline_that_the_loop_has_not_acquired() -> None:
    """A plan may begin to serve while the loop ends. Its connections end with the manager."""
    closed = []

    async def close() -> None:
        closed.append(1)

    manager = manager_of(Settings(nodes=1))
    pipeline: Any = SimpleNamespace(epoch=1, close=close)
    manager._install_pipeline(pipeline)
    await manager.close()
    assert closed


async def test_a_wait_for_a_plan_ends_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that goes on keeps the wait alive. One that stands still ends it with an error."""
    monkeypatch.setattr(manager_module, "SILENCE_SECONDS", 0.2)

    async def serve(self: ClusterManager, plan: Plan) -> None:
        """Load for a second, and then never again."""
        for step in range(10):
            self.loads.done["a"] = (step, 100)
            await asyncio.sleep(0.1)
        loaded.set()
        await asyncio.sleep(60)

    loaded = asyncio.Event()
    monkeypatch.setattr(ClusterManager, "_serve", serve)
    manager = manager_of(Settings(nodes=1))
    waiting = asyncio.create_task(manager.acquire())
    await asyncio.sleep(0)
    manager._apply_event(WorkerJoined(worker("a")))
    async with asyncio.timeout(30):
        await loaded.wait()
        assert not waiting.done()
        with pytest.raises(NotReadyError, match=r"no progress for 0\.2 s\. Try again"):
            await waiting
    await manager.close()


async def test_an_unexpected_exception_ends_the_process_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manager reports the bug once, and ignores later events."""

    def broken(view: View, event: Event, now: float) -> View:
        raise OverflowError("int too large to convert to float")

    manager = manager_of(Settings(nodes=1))
    reported: list[ClusterError] = []
    manager.end_process = reported.append
    monkeypatch.setattr(manager_module, "apply", broken)
    for _ in range(3):
        manager._apply_event(WorkerLost("a", "silent"))
    (error,) = reported
    assert "OverflowError: int too large" in str(error)


@pytest.mark.parametrize("answer", ["too slow", "a pipeline", "a group", "no figure"])
@pytest.mark.parametrize(
    "settings",
    [Settings(nodes=2), Settings(nodes=2, nodes_required=True, wait=0.0, first_wait=60.0)],
)
async def test_a_group_is_planned_again_with_its_measured_sums(
    monkeypatch: pytest.MonkeyPatch, answer: str, settings: Settings
) -> None:
    """The members measure their sums when they load. Where these make another plan the best, that one is next."""
    started: list[int] = []
    closed = []

    async def close() -> None:
        closed.append(1)

    async def run(self: PlanStart) -> Any:
        started.append(self.plan.group_size)
        if self.plan.group_size > 1 and answer != "no figure":
            self.loads.collectives.update(a=5e-3, b=7e-3)
        return SimpleNamespace(epoch=self.plan.epoch, close=close)

    def planner(members: Sequence[Member], epoch: int) -> Plan:
        measured = [member.collectives.get(frozenset("ab")) for member in members]
        if measured != [None, None] and answer == "too slow":
            raise SpanError(f"the sums take {measured}")
        single = StagePlan("a", Span(0, 8), True, True, 1, 1, 9, 1.0)
        pair = replace(single, members=("a", "b"))
        is_group = measured == [None, None] or answer == "a group"
        is_group &= answer != "no figure" or not started  # another plan, for another reason
        return Plan(epoch, (pair if is_group else single,))

    monkeypatch.setattr(PlanStart, "run", run)
    manager = manager_of(settings, planner)
    for name in ("a", "b"):
        manager._apply_event(WorkerJoined(worker(name)))
    await asyncio.sleep(0.05)
    assert len(closed) == (answer not in ("a group", "no figure"))
    assert started == {"a pipeline": [2, 1]}.get(answer, [2])
    assert (manager.view.phase is Phase.SERVING) == (answer != "too slow")
    if answer == "too slow":
        assert "[0.007, 0.007]" in manager.view.problem
    await manager.close()


def test_a_new_process_has_measured_nothing() -> None:
    """A worker that came back may have another cable."""
    view = apply(View(Settings()), WorkerJoined(worker("a")), 0.0)
    view = apply(view, GroupMeasured(("a",), 0.05), 1.0)
    same = apply(view, WorkerJoined(view.members["a"]), 2.0)
    assert same.members["a"].collectives == {frozenset("a"): 0.05}
    other = apply(view, WorkerJoined(replace(worker("a"), worker_id="another")), 2.0)
    assert not other.members["a"].collectives


def test_only_workers_on_this_machine_count() -> None:
    """Used and cached bytes of workers on loopback are added. Remote workers and workers without status are not."""
    clients: dict[str, Any] = {
        "127.0.0.1:1": SimpleNamespace(worker_status=pb.WorkerStatus(memory_used=5, memory_cached=2)),
        "127.0.0.1:2": SimpleNamespace(worker_status=None),
        "203.0.113.9:1": SimpleNamespace(worker_status=pb.WorkerStatus(memory_used=100)),
    }
    manager = cast(ClusterManager, SimpleNamespace(membership=SimpleNamespace(clients=clients)))
    assert ClusterManager.local_worker_bytes(manager) == 7


def test_lost_workers_are_forgotten() -> None:
    """One that returns elsewhere takes its row and its failures with it. Another one goes after an hour."""
    view = View(Settings())
    for number in range(500):
        member = replace(worker("a"), address=f"10.0.0.1:{number}", worker_id=f"p{number}")
        view = apply(view, WorkerJoined(member), float(number))
        view = apply(view, WorkerLost(member.address, "silent"), number + 0.5)
    assert len(view.members) == 1
    assert next(iter(view.members.values())).failure_count > 1
    view = apply(view, TimePassed(), 499.5 + FORGET_SECONDS - 1)
    assert len(view.members) == 1
    assert not apply(view, TimePassed(), 499.5 + FORGET_SECONDS).members
