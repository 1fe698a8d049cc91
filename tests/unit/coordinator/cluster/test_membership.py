"""Membership with fake clients: workers that leave, do not answer, report nonsense, or round in another way."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.events import Event, apply
from coordinator.cluster.membership import ArithmeticGroup, ManagerOptions, Membership
from coordinator.cluster.view import Member, MemberState, Settings, View
from coordinator.pipeline.worker_connection import Candidate
from mtp.device import unlike_machines
from proto import cluster_pb2 as pb
from proto.errors import WorkerLostError
from proto.rpc.status_codes import NO_MEMBERS


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
    unused: Any = SimpleNamespace(exact=False)
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
    fields = {"worker_id": "w1", "name": "mac-2", "fingerprint": "f", **changes}
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


class Members:
    """A membership whose events change a view, as in the manager."""

    def __init__(self) -> None:
        options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings())
        config = SimpleNamespace(num_layers=8)
        model: Any = SimpleNamespace(
            exact=False, checkpoint=SimpleNamespace(config=config), ref=pb.ModelRef(fingerprint="f")
        )
        self.view = View(Settings())
        self.membership = Membership(model, options, lambda: self.view, self._apply, print)

    def _apply(self, event: Event) -> None:
        self.view = apply(self.view, event, 0.0)

    async def admit(self, info: pb.WorkerInfo, trust: object = None) -> None:
        """Let the worker at `a:7000` report `info`."""
        client: Any = Leaving()
        client.trust = trust
        await self.membership._admit_worker("a:7000", client, info)
        assert client.closed


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


def test_the_first_machine_sets_the_arithmetic_for_good() -> None:
    group = ArithmeticGroup(exact=True)
    assert group.refusal("mac-1", M4) == ""
    assert group.refusal("mac-2", M4) == ""
    reason = group.refusal("mac-3", M1)
    assert "applegpu_g13s" in reason and "mac-1 as metal applegpu_g16s" in reason
    assert "unknown machine" in group.refusal("old", "")
    assert group.refusal("mac-1", M4) == ""


def test_without_exact_every_machine_takes_part() -> None:
    group = ArithmeticGroup(exact=False)
    assert group.refusal("mac-1", M4) == group.refusal("mac-3", M1) == ""


def test_unlike_machines_are_named_with_their_arithmetic() -> None:
    assert unlike_machines([("a", M4), ("b", M4)]) == ""
    assert unlike_machines([("a", M4), ("b", M1), ("c", M4)]) == f"a, c: {M4}; b: {M1}"
