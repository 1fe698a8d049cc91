"""The preparation of a plan: which workers load, which only fetch, and how failures are reported."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import psutil
import pytest

from coordinator.cluster.discovery import on_this_machine
from coordinator.cluster.events import PlanPrepared, PreparationFailed
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.plan_start import GroupStart, PlanStart, StartError, workers_in_use
from coordinator.cluster.view import Settings, View
from coordinator.pipeline.remote_pipeline import RemotePipeline
from coordinator.pipeline.worker_client import WorkerClient
from coordinator.planning.capacity import Capacity
from mtp.device import FrameLimits
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, MemoryLimitError, WorkerLostError
from proto.span import Span
from proto.stage_options import StageOptions
from tests.support.protocol.cluster_walk import worker

FAR = "192.0.2.7:7100"
"""An address of another machine."""

EPOCH = 4


class Cluster:
    """Workers `a`, `b` and `c` of which `a` and `b` serve, and the next plan over all of them. `broken` cannot load."""

    def __init__(
        self,
        *fetching: str,
        broken: str = "",
        error: Exception | None = None,
    ) -> None:
        self.chunks: dict[str, tuple[int, int]] = {}
        """The chunks that workers report."""
        members = {name: replace(worker(name), has_files=name not in fetching) for name in ("a", "b", "c")}
        self.view = View(Settings(), epoch=EPOCH, members=members, serving=("a", "b"))
        stages = [
            SimpleNamespace(node=name, nodes=(name,), span=Span(i, i + 1), first=i == 0, last=i == 2)
            for i, name in enumerate(members)
        ]
        nodes = tuple(members)
        self.plan: Any = SimpleNamespace(epoch=EPOCH + 1, stages=stages, nodes=nodes, group_size=1)
        self.calls: list[tuple[str, str]] = []
        self.requests: list[pb.LoadRequest] = []
        self.broken, self.error = broken, error or MemoryLimitError("too little memory")
        clients = {n: SimpleNamespace(address=n, owner=n, load=self._loader(n)) for n in members}
        self.membership: Any = SimpleNamespace(clients=clients, probe=self._probe)
        self.model: Any = SimpleNamespace(
            capacity=lambda plan: SimpleNamespace(sequences=1, kv_tokens=1, prefix_bytes=0),
            ref=pb.ModelRef(name="m"),
            options=StageOptions(),
            provider=SimpleNamespace(provide_weights=self._provide),
        )

    async def prepare(self) -> PlanPrepared | PreparationFailed:
        """Run the preparation."""
        options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings())
        start = PlanStart(self.plan, self.view, self.model, options, self.membership)
        return await start.prepare(frozenset({"a1", "b1", "c1"}))

    async def start(self) -> RemotePipeline:
        """Start the plan over workers that load at once."""
        options = ManagerOptions(pb.Coordinator(id="c", name="c"), Settings())
        return await PlanStart(self.plan, self.view, self.model, options, self.membership).run()

    def _loader(self, name: str) -> Any:
        async def load(request: pb.LoadRequest, on_progress: Any) -> Any:
            self.calls.append(("load", name))
            self.requests.append(request)
            if name == self.broken:
                raise self.error
            on_progress(1, 1)
            longest, shortest = self.chunks.get(name, (512, 128))
            return pb.LoadResult(layers="1 packed", longest_chunk=longest, shortest_chunk=shortest)

        return load

    async def _provide(self, client: Any, request: pb.LoadRequest, on_progress: Any) -> None:
        self.calls.append(("fetch", client.address))

    async def _probe(self, address: str) -> None:
        self.calls.append(("probe", address))


async def test_new_workers_load_and_the_others_only_fetch() -> None:
    """The workers of the plan in force write what they lack to their disks, and keep their stages."""
    cluster = Cluster("b", "c")
    assert await cluster.prepare() == PlanPrepared(frozenset({"a1", "b1", "c1"}))
    assert sorted(cluster.calls) == [("fetch", "b"), ("fetch", "c"), ("load", "c")]
    (request,) = cluster.requests
    assert request.epoch == EPOCH, "the plan in force goes on"


@pytest.mark.parametrize(
    ("error", "address"), [(MemoryLimitError("too little memory"), "c"), (KeyError("a bug"), None)]
)
async def test_a_failure_is_an_event(error: Exception, address: str | None) -> None:
    """It names the worker that answers and cannot load. A bug has no culprit."""
    cluster = Cluster(broken="c", error=error)
    event = await cluster.prepare()
    assert isinstance(event, PreparationFailed)
    assert event.address == address
    assert str(error.args[0]) in event.reason
    assert (("probe", "c") in cluster.calls) == isinstance(error, ClusterError)


async def test_frames_suit_every_machine_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers say which chunks suit them. The coordinator's machine does not count."""

    async def open_nothing(pipeline: RemotePipeline, ids: list[str]) -> None:
        """Connect no worker."""

    monkeypatch.setattr(RemotePipeline, "open", open_nothing)
    cluster = Cluster()
    cluster.chunks = {"a": (1024, 1024), "b": (512, 128), "c": (512, 512)}
    assert (await cluster.start()).frame_limits == FrameLimits(512, 512)
    cluster.chunks = dict.fromkeys("abc", (1024, 1024))
    assert (await cluster.start()).frame_limits == FrameLimits(1024, 1024)
    cluster.chunks = {"b": (0, 0)}
    with pytest.raises(StartError, match="chunks of 0 to 0 tokens"):
        await cluster.start()


def test_this_machine_is_in_use_while_it_serves_alone() -> None:
    """Its workers load when the model of this process has gone."""
    plan: Any = SimpleNamespace(nodes=("127.0.0.1:7100", FAR), group_size=1)
    assert workers_in_use(View(Settings()), plan) == {"127.0.0.1:7100"}
    assert workers_in_use(View(Settings(), serving=(FAR,)), plan) == {FAR}
    group: Any = SimpleNamespace(nodes=("127.0.0.1:7100", FAR), group_size=2)
    assert workers_in_use(View(Settings()), group) == set(group.nodes)


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:50505", True),
        ("localhost:50505", True),
        ("[::1]:50505", True),
        ("192.168.7.2:50505", True),
        ("192.168.7.3:50505", False),
        ("mac-2.local:50505", False),
    ],
)
def test_a_worker_on_this_machine_is_recognized(monkeypatch: pytest.MonkeyPatch, address: str, here: bool) -> None:
    """A loopback address, or one of this machine's interfaces, is local; any other address is not."""
    interfaces = {"en0": [SimpleNamespace(address="192.168.7.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert on_this_machine(address) is here


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "ended"),
        (pb.WorkerStatus(epoch=EPOCH, fault=pb.Fault(message="no memory")), "no memory"),
        (pb.WorkerStatus(engine_stall_ms=2900), "stuck"),
    ],
    ids=["ended", "fault", "stuck"],
)
async def test_a_lost_process_of_a_group_fails_the_plan(
    monkeypatch: pytest.MonkeyPatch, status: pb.WorkerStatus | None, words: str
) -> None:
    """The pipeline fails with the cause, and suspects the worker that the process belongs to."""
    watched: list[Any] = []
    monkeypatch.setattr(WorkerClient, "watch", lambda _, timeout, *calls: watched.extend(calls))

    async def start_member(*_: Any) -> pb.MemberReply:
        return pb.MemberReply(port=1)

    parts = {"call": start_member, "stub": MagicMock(), "address": FAR, "owner": FAR, "trust": None, "node": ""}
    group = GroupStart(pb.Coordinator(), EPOCH, 3.0, 9000)
    stages: Any = await group.start([[cast(Any, SimpleNamespace(**parts))]])
    pipeline = RemotePipeline(stages, EPOCH, Capacity(1, 1, 0), 3.0, [Span(0, 2)])
    group.serve(pipeline)
    on_status, on_lost = watched
    if status is None:
        on_lost(WorkerLostError("it ended"))
    else:
        on_status(status)
    with pytest.raises(ClusterError, match=words):
        await pipeline.receive_frame()
    assert pipeline.suspect == FAR
    await group.close()
