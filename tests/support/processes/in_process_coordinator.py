"""A coordinator in the test's own process: the real loop, scheduler and cluster manager over real workers.

A test can read every token a client receives, the cluster view and the state of the workers. There is no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.cluster.manager import ClusterManager
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import MemberState, Phase, Settings, View
from coordinator.drafts.controller import Controller, MtpMode
from coordinator.pipeline.pipeline import Pipeline
from coordinator.schedule.admission import Limits
from coordinator.schedule.loop import GenerationLoop
from coordinator.schedule.request import Finished, GenerationRequest, PrefillProgress, TokenChunk, generate
from coordinator.schedule.scheduler import Scheduler
from coordinator.serve.live_status import LiveStatus
from coordinator.status.cluster_status import NodeStatus
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.errors import MemoryLimitError
from proto.params import SamplingParams
from proto.stage_options import StageOptions

TIMEOUT = 2.0
"""Seconds. Failure timeout in tests: shorter than the default, longer than a delay of a busy machine."""

DEADLINE = 60.0
"""Seconds. Longest wait for any condition in a test."""


@dataclass
class ReceivedAnswer:
    """The tokens that one client received, with the time of each chunk, and the prompt tokens computed so far."""

    tokens: list[int] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: Finished | None = None

    @property
    def reason(self) -> str:
        """Return the finish reason. Fails if the answer has not ended."""
        assert self.end is not None, "the answer has not ended"
        return self.end.reason


class InProcessCoordinator:
    """A coordinator. `answer` and `answers` act as its clients."""

    def __init__(self, manager: ClusterManager, loop: GenerationLoop) -> None:
        self.manager = manager
        self.loop = loop
        self.status = LiveStatus(loop, manager, "toy", lambda: NodeStatus("this process"))

    @property
    def view(self) -> View:
        """Return the manager's current view of the cluster."""
        return self.manager.view

    async def answer(self, request: GenerationRequest, told: ReceivedAnswer | None = None) -> ReceivedAnswer:
        """Run `request` to its end. Return `told`, or a new record, with everything the client received."""
        told = ReceivedAnswer() if told is None else told
        async with asyncio.timeout(DEADLINE):
            async for event in generate(self.loop, request):
                self.loop.scheduler.check()
                if isinstance(event, PrefillProgress):
                    told.prefilled.append(event.done)
                elif isinstance(event, TokenChunk):
                    told.tokens += event.tokens
                    told.times.append(time.monotonic())
                elif isinstance(event, Finished):
                    told.end = event
        return told

    async def answers(self, requests: Sequence[GenerationRequest]) -> list[ReceivedAnswer]:
        """Run all requests concurrently. Return their records in order."""
        return list(await asyncio.gather(*map(self.answer, requests)))

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait until `condition` is true. Return the seconds it took.

        Raises AssertionError if the condition, described by `what`, is not true within DEADLINE.
        """
        started = time.monotonic()
        while not condition():
            assert time.monotonic() < started + DEADLINE, f"{what}: never. {self.view}"
            await asyncio.sleep(0.01)
        return time.monotonic() - started

    async def served_by(self, *addresses: str) -> None:
        """Wait until exactly these workers serve."""
        await self.until(
            lambda: self.view.phase is Phase.SERVING and set(self.view.serving) == set(addresses),
            f"served by {addresses}",
        )

    def state(self, address: str) -> MemberState | None:
        """Return the state of the member at `address`, or None if there is none."""
        member = self.view.members.get(address)
        return member.state if member else None

    async def report_state(self) -> dict[str, pb.StateReport]:
        """Return the state report of every known worker, by address."""
        request = pb.StateReportRequest(coordinator=self.manager.options.me)
        return {
            a: await client.call(client.stub.ReportState, request)
            for a, client in self.manager.membership.clients.items()
        }

    async def check_nothing_left(self) -> None:
        """Check that no worker holds a sequence once all answers have ended."""
        deadline = time.monotonic() + DEADLINE
        while any(reply.sequences for reply in (await self.report_state()).values()):
            assert time.monotonic() < deadline, await self.report_state()
            await asyncio.sleep(0.05)


async def _cannot(epoch: int) -> Pipeline:
    raise MemoryLimitError("this machine serves nothing alone in this test")


@asynccontextmanager
async def running_coordinator(
    model: Path,
    addresses: Sequence[str],
    *,
    name: str = "head",
    settings: Settings | None = None,
    timeout: float = TIMEOUT,
    mtp: str = "1",
) -> AsyncIterator[InProcessCoordinator]:
    """Run a coordinator over the workers at these addresses. It never serves alone."""
    checkpoint = Checkpoint.open(model)
    reference = pb.ModelRef(
        # The reference has no path, as on separate machines: workers find the checkpoint under --model.
        name="toy",
        fingerprint=await asyncio.to_thread(checkpoint.fingerprint),
    )
    served = ServedModel(checkpoint, reference, StageOptions("float32"), draft_depth=1, max_sequences=16)
    settings = settings or Settings(
        nodes=len(addresses),
        wait=40.0,
        recovery_wait=20.0,
        why_not_alone="it serves nothing alone here",
    )
    options = ManagerOptions(
        pb.Coordinator(id=f"{name}-{time.monotonic_ns()}", name=name),
        settings,
        tuple(addresses),
        failure_timeout=timeout,
    )
    manager = ClusterManager(served, options, _cannot)
    scheduler = Scheduler(Limits(4096, prefill_chunk=16), Controller(MtpMode.parse(mtp)))
    loop = GenerationLoop(manager, scheduler)
    manager.count_open_requests = lambda: len(scheduler.running) + len(scheduler.waiting)
    manager.hand_over, manager.is_handed_over = lambda begin: loop.hand_over(begin=begin), loop.is_handed_over
    manager.start()
    try:
        async with asyncio.timeout(DEADLINE):
            await loop.start()
        yield InProcessCoordinator(manager, loop)
    finally:
        await loop.close()
        await manager.close()


def requests(count: int = 3, tokens: int = 80) -> list[GenerationRequest]:
    """Return greedy and sampled requests of several lengths."""
    return [
        GenerationRequest(
            tuple(range(5 + i, 20 + 9 * i)),
            tokens + 7 * i,
            SamplingParams(temperature=0.9 * (i % 2), seed=i),
            request_id=f"r{i}",
        )
        for i in range(count)
    ]
