"""Membership: workers that leave, do not answer, report nonsense or round in another way, and a change of the model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.events import FORGET_SECONDS, Event, TimePassed, apply
from coordinator.cluster.membership import ArithmeticGroup, ManagerOptions, Membership, member_of, unlike_machines
from coordinator.cluster.view import Member, MemberState, Settings, View
from coordinator.pipeline.worker_connection import Candidate
from proto import cluster_pb2 as pb
from proto.errors import WorkerLostError
from proto.rpc.listener import reachable_address
from proto.rpc.status_codes import NO_MEMBERS
from proto.stage_options import StageOptions
from tests.support.processes.stub_worker import StubMember, stub_members
from tests.support.processes.waits import until


class Leaving:
    """A client of a draining worker that does not answer its Unload."""

    closed = False
    me = pb.Coordinator(id="c", name="c")
    stub = SimpleNamespace(Unload=None)

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def call(self, method: Any, request: pb.UnloadRequest) -> None:
        self.asked.set()
        await asyncio.sleep(60)

    async def close(self) -> None:
        self.closed = True


async def test_a_coordinator_that_ends_stops_the_heartbeats_of_a_leaving_worker() -> None:
    """Open heartbeats would renew the lease, and the worker would wait for its release."""
    options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings())
    unused: Any = SimpleNamespace(options=StageOptions())
    membership = Membership(unused, options, lambda: View(Settings()), print, print)
    leaving: Any = Leaving()
    membership.clients["a"] = leaving
    membership._record_draining("a")
    async with asyncio.timeout(10):
        await leaving.asked.wait()
        await membership.close()
    assert leaving.closed


# ---- reports


def report(**changes: Any) -> pb.WorkerInfo:
    """Return a valid report, changed by `changes`."""
    hardware = pb.Hardware(
        memory_limit=changes.pop("memory_limit", 2**30),
        bytes_per_second=changes.pop("bytes_per_second", 1e11),
    )
    fields = {"worker_id": "w1", "name": "mac-2", "fingerprint": OLD, **changes}
    return pb.WorkerInfo(hardware=hardware, **fields)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker_id": "x" * 10**6}, "invalid worker id"),
        ({"model": "other", "fingerprint": "other"}, "has another checkpoint"),
    ],
    ids=["nonsense", "another checkpoint"],
)
async def test_a_worker_that_no_plan_can_use_is_refused_once(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out with one warning, however often it is described, and no plan uses it."""
    members = Members()
    for _ in range(3):
        await members.admit(report(**changes))
    refused = members.view.members["a:7000"]
    assert (refused.state, reason in refused.reason) == (MemberState.REFUSED, True), refused
    assert members.view.usable() == []
    assert members.membership.clients == {}
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.message for r in warnings] == ["worker refused"]
    assert len(str(vars(warnings[0]))) < 5_000


@pytest.mark.parametrize("joined_first", [False, True])
async def test_workers_inside_and_outside_the_cluster_are_not_mixed(joined_first: bool) -> None:
    """The later one is refused before any plan, and the reason names the worker to restart."""
    members = Members()
    watched: Any = SimpleNamespace(trust=object() if joined_first else None)
    members.membership.clients["b:7000"] = watched
    members.membership._joining["b:7000"] = Member("b:7000", "w2", "mac-1", 2**30)
    await members.admit(report(), trust=None if joined_first else object())
    refused = members.view.members["a:7000"]
    assert refused.state is MemberState.REFUSED
    advice = "Restart it" if joined_first else "b:7000, which has not joined the cluster. Restart"
    assert advice in refused.reason
    assert refused.reason.endswith("with --join TOKEN, from mtp-coord token create")


LOOPBACK, REMOTE = "127.0.0.1:7000", "192.0.2.7:7000"


@pytest.mark.parametrize(("known", "new"), [(LOOPBACK, REMOTE), (REMOTE, LOOPBACK)])
async def test_a_worker_on_loopback_shares_no_plan_with_another_machine(known: str, new: str) -> None:
    """The later one is refused before any plan, and the reason names the worker to restart and its new address."""
    members = Members()
    members.membership.clients[known] = SimpleNamespace(trust=None)  # type: ignore[assignment]
    members.membership._joining[known] = Member(known, "w2", "mac-2", 2**30)
    await members.admit(report(), address=new)
    reason = members.view.members[new].reason
    assert f"{REMOTE} cannot reach {LOOPBACK}" in reason
    assert "Restart it" in reason if new == LOOPBACK else f"Restart the worker at {LOOPBACK}" in reason
    assert reason.endswith(f"--listen {reachable_address()}:7000")


async def test_a_worker_on_loopback_may_share_a_plan_with_another_of_its_machine() -> None:
    """Only other machines are out of its reach."""
    members = Members()
    members.membership.clients[LOOPBACK] = SimpleNamespace(trust=None)  # type: ignore[assignment]
    assert members.membership._loopback_reason(f"{reachable_address()}:7000") == ""


class Members:
    """A membership whose events change a view, as in the manager."""

    def __init__(self, *workers: StubMember) -> None:
        addresses = tuple(worker.address for worker in workers)
        options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings(), addresses)
        self.view = View(Settings())
        self.membership = Membership(model(OLD), options, lambda: self.view, self._apply, lambda address, status: None)

    def _apply(self, event: Event) -> None:
        self.view = apply(self.view, event, time.monotonic())

    async def admit(self, info: pb.WorkerInfo, trust: object = None, address: str = "a:7000") -> None:
        """Let the worker at `address` report `info`."""
        client: Any = Leaving()
        client.trust = trust
        await self.membership._admit_worker(address, client, info)
        assert client.closed

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


def test_a_peer_that_is_no_member_is_shown_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The status has the advice. A peer that is silent later is forgotten."""
    members = Members()
    candidate = Candidate("a:7000", ("a:7000",))
    stranger = WorkerLostError(f"a:7000 is lost: {NO_MEMBERS[1]}")
    for _ in range(3):
        members.membership._record_silence(candidate, "a:7000", stranger)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    member = members.view.members["a:7000"]
    assert member.state is MemberState.REFUSED
    assert "Start it with --join" in member.reason
    members.membership._record_silence(candidate, "a:7000", WorkerLostError("no answer"))
    assert members.view.members == {}


# ---- machines that round in the same way

M4, M1 = "metal applegpu_g16s, mlx 0.32.4", "metal applegpu_g13s, mlx 0.32.4"
CARD = "cuda sm_90, mlx 0.32.4"


def machines(*arithmetics: str, memory: int = 8) -> list[Member]:
    """Return machines with these arithmetics, named `mac-1` and so on."""
    return [Member(f"{i}", f"{i}", f"mac-{i}", memory, arithmetic=a) for i, a in enumerate(arithmetics, 1)]


def test_a_machine_that_rounds_differently_is_refused_by_what_differs() -> None:
    """The reason names both machines, the first difference and what removes it."""
    group = ArithmeticGroup(exact=True)
    assert group.refusal("mac-1", M4) == group.refusal("mac-2", M4) == ""
    for arithmetic, difference, advice in (
        (M1, "another chip than mac-1", "Name only equal ones with --worker"),
        (CARD, "another backend than mac-1", "Name only equal ones with --worker"),
        (M4.replace("0.32.4", "0.32.5"), "another version of mlx than mac-1", "Install the same version on both"),
        ("", "another backend than mac-1: unknown", "Name only equal ones with --worker"),
    ):
        reason = group.refusal("mac-3", arithmetic)
        assert difference in reason and advice in reason and M4 in reason and arithmetic in reason


def test_the_first_plan_of_an_exact_cluster_takes_machines_that_are_enough() -> None:
    """Machines that are enough for the plan decide, then the memory, and not which machine answers first."""
    group = ArithmeticGroup(exact=True, nodes=2)
    group.choose(machines(CARD))
    assert group.refusal("mac-1", M4)
    group.choose(machines(CARD, M4))
    assert group.refusal("mac-2", M4)  # equal memory, so the choice stays
    group.choose(machines(CARD, M4, M4))
    assert group.refusal("mac-2", M4) == "" and group.refusal("card", CARD)
    group.choose([*machines(M4, M4), *machines(CARD, memory=99)])
    assert group.refusal("mac-2", M4) == ""
    group.choose([*machines(M4, M4), *machines(CARD, CARD, memory=9)])
    assert group.refusal("mac-2", M4)


def test_without_exact_every_machine_takes_part() -> None:
    group = ArithmeticGroup(exact=False)
    assert group.refusal("mac-1", M4) == group.refusal("mac-3", M1) == ""


def test_unlike_machines_are_named_with_their_arithmetic() -> None:
    assert unlike_machines([("a", M4), ("b", M4)]) == ""
    found = unlike_machines([("a", M4), ("b", M1), ("c", M4)])
    assert found == f"answers may differ in rounding between a, c ({M4}) and b ({M1})"


def test_a_long_name_of_a_chip_does_not_hide_the_version() -> None:
    """Two versions of mlx on one processor with a long name are unlike."""
    chip = "cpu x86_64 AMD Ryzen Threadripper PRO 7995WX 96-Cores, mlx "
    one, other = (
        pb.WorkerInfo(worker_id="a", hardware=pb.Hardware(arithmetic=chip + version))
        for version in ("0.32.4", "0.32.5")
    )
    assert member_of("a:1", one).arithmetic != member_of("a:1", other).arithmetic


OLD, NEW = "0" * 64, "1" * 64


def model(fingerprint: str, *, can_provide: bool = True) -> Any:
    """Return a model, whose weights the coordinator can provide or not."""
    return SimpleNamespace(
        options=StageOptions(),
        checkpoint=SimpleNamespace(config=SimpleNamespace(num_layers=8)),
        ref=pb.ModelRef(name="m", fingerprint=fingerprint),
        provider=SimpleNamespace(problem="" if can_provide else "has no copy of the model"),
    )


@pytest.fixture
def workers() -> Iterator[tuple[StubMember, StubMember]]:
    """Run two workers with the files of the old model."""
    first, second = StubMember("first", OLD), StubMember("second", OLD)
    with stub_members(first, second):
        yield first, second


@asynccontextmanager
async def running(*workers: StubMember) -> AsyncIterator[Members]:
    cluster = Members(*workers)
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


@pytest.mark.parametrize("can_provide", [True, False])
async def test_a_worker_without_a_status_is_that_of_the_new_model(
    workers: tuple[StubMember, StubMember], can_provide: bool
) -> None:
    """A worker that is watched joins with its first status, and with the description for the new model.

    The connection of a refused one ends, so that its heartbeats do not hold it back from other coordinators.
    """
    worker, _ = workers
    worker.may_report.clear()
    async with running(worker) as cluster:
        await until(lambda: worker.watchers == 1)
        await cluster.change_to(model(NEW, can_provide=can_provide))
        assert cluster.state(worker) is not MemberState.READY
        worker.may_report.set()
        if can_provide:
            assert not (await cluster.member(worker)).has_files
        else:
            await until(lambda: worker.watchers == 0)
            refused = await cluster.member(worker, MemberState.REFUSED)
            assert "has no copy of the model" in refused.reason


# ---- what stays


async def test_nothing_stays_of_candidates_that_are_gone() -> None:
    """Workers come and go at other addresses for weeks. What is known of them goes with them, or an hour later."""
    members = Members()
    look = members.membership._ask_candidates
    for number in range(500):
        address = f"127.0.0.1:{number + 1}"
        candidate = Candidate(f"name-{number}", (address,))
        members.membership._record_silence(candidate, address, WorkerLostError("no answer"))
        look([candidate])
        members.membership._refuse_worker(Member(address, f"w{number}", "w", 0), "another checkpoint")
    look([candidate])
    assert len(members.membership._described_at) == len(members.membership._last_errors) == 1
    members.view = apply(members.view, TimePassed(), time.monotonic() + FORGET_SECONDS)
    assert members.view.members == {}
    await members.membership.close()


async def test_a_tick_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in one tick is logged. Workers are looked for again."""
    ticks = list[int]()

    def fail_once() -> TimePassed:
        """Return the event of a tick, but not of the first."""
        ticks.append(len(ticks))
        return TimePassed(1 // ticks[-1])

    members = Members()
    members.membership.start(fail_once)
    await until(lambda: len(ticks) > 2)
    await members.membership.close()
    assert "looking for workers failed" in caplog.text
