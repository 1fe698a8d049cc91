"""Single faults on real processes: each is detected in time, and no answer changes."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from coordinator.cluster import decide
from coordinator.cluster.membership import ManagerOptions
from coordinator.cluster.view import MemberState, Settings
from coordinator.pipeline.worker_client import WorkerClient
from coordinator.schedule.request import GenerationRequest
from proto import cluster_pb2 as pb
from proto.errors import NotReadyError
from proto.params import SamplingParams
from tests.support.processes.in_process_coordinator import (
    DEADLINE,
    TIMEOUT,
    InProcessCoordinator,
    ReceivedAnswer,
    requests,
    running_coordinator,
)
from tests.support.processes.processes import serving
from tests.support.processes.team import Team, running_team

pytestmark = pytest.mark.chaos

Wanted = dict[str, list[int]]
"""Expected tokens by request."""

SLACK = 1.5
"""Seconds. Delay beyond the failure timeout that two busy cores may cause."""

USUAL = ManagerOptions.failure_timeout
"""Seconds. The default failure timeout, for two of the faults."""

AT_ONCE = 1.5
"""Seconds. Limit for faults that are detected without a timeout."""

FIRST = repr(requests(1)[0])

LOADED = 5
"""Tokens that every client has before the fault."""

TRIES = 3
"""Tries of a test whose times exceed their limits. Other load seldom causes three failures in a row."""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[Team]:
    with running_team(tmp_path_factory.mktemp("team"), toy, 2) as team:
        yield team


@pytest.fixture(autouse=True)
def healthy(team: Team) -> Iterator[None]:
    """Return a cluster whose workers are all well, repaired if an earlier test broke one."""
    yield
    team.end_faults()


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    """Return the undisturbed answers."""
    return {}


class SlowError(AssertionError):
    """Failure of a time limit only. Everything else was right."""


def in_time(seconds: float, limit: float) -> None:
    """Raise SlowError if `seconds` exceed their limit."""
    if seconds >= limit:
        raise SlowError(f"it took {seconds:.2f} s, and {limit:.2f} s are too long")


def again_if_slow(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Mark a test that runs again after a SlowError, because other load may delay it. Other failures are final."""

    @functools.wraps(test)
    async def tried(team: Team, toy: Path, **fixtures: object) -> None:
        for _ in range(TRIES - 1):
            try:
                return await test(team=team, toy=toy, **fixtures)
            except SlowError as error:
                print(error)
            team.end_faults()
            for number, worker in enumerate(team.workers):
                if not worker.running:
                    await asyncio.to_thread(team.restart, number, toy)
        return await test(team=team, toy=toy, **fixtures)

    return tried


@dataclass
class Load:
    """Clients that have some tokens each and wait for more."""

    head: InProcessCoordinator
    told: list[ReceivedAnswer]
    answers: asyncio.Future[list[ReceivedAnswer]]
    wanted: list[list[int]]

    async def noticed(self, fault: Callable[[], None], limit: float) -> None:
        """Inject a fault, and check that the plan ends within its limit."""
        pipeline = self.head.manager.pipeline
        fault()
        seconds = await self.head.until(lambda: self.head.manager.pipeline is not pipeline, "the fault was noticed")
        in_time(seconds, limit)

    async def end_well(self) -> None:
        """Check that all answers end and equal the undisturbed ones."""
        await self.answers
        assert [t.reason for t in self.told] == ["length"] * len(self.told)
        assert [t.tokens for t in self.told] == self.wanted


@asynccontextmanager
async def loaded(
    team: Team,
    toy: Path,
    wanted: Wanted,
    asked: list[GenerationRequest] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[InProcessCoordinator, Load]]:
    """Run a coordinator and clients on a healthy cluster while the block injects a fault."""
    asked = requests() if asked is None else asked
    async with running_coordinator(toy, team.addresses, **options) as head:
        for request in asked:
            if repr(request) not in wanted:
                wanted[repr(request)] = (await head.answer(request)).tokens
        await head.answers(asked)  # together, so that the engines know frames of this size
        told = [ReceivedAnswer() for _ in asked]
        answers = asyncio.gather(*(head.answer(r, t) for r, t in zip(asked, told, strict=True)))
        try:
            await head.until(lambda: all(len(t.tokens) >= LOADED for t in told), "tokens for all")
            yield head, Load(head, told, answers, [wanted[repr(request)] for request in asked])
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)


# ---- detection


@again_if_slow
async def test_an_engine_that_is_stuck(team: Team, toy: Path, wanted: Wanted) -> None:
    """A worker that answers heartbeats and computes nothing is lost within the timeout, and used again later."""
    first, second = team.addresses
    async with loaded(team, toy, wanted, timeout=USUAL) as (head, clients):
        await clients.noticed(lambda: team.set_fault(1, "stuck"), USUAL + SLACK / 2)
        await head.served_by(first)
        await clients.end_well()
        member = head.view.members[second]
        assert "stuck" in member.reason
        team.set_fault(1)
        await head.until(lambda: head.state(second) is MemberState.READY, "back again")
        await head.check_nothing_left()


@patch("coordinator.schedule.backups.MIN_NEW_TOKENS", 4)
@patch("coordinator.schedule.backups.CALM_PAUSE", 0.0)
@patch("coordinator.schedule.backups.SPARED_SECONDS", 0.0)
@patch("coordinator.schedule.backups.FIRST_PAUSE", 0.0)
@again_if_slow
async def test_a_worker_that_is_stopped(
    team: Team, toy: Path, wanted: Wanted, caplog: pytest.LogCaptureFixture
) -> None:
    """After SIGSTOP a worker is lost, and the answers continue from their backups. Continued, it joins again."""
    first, second = team.addresses
    caplog.set_level(logging.INFO)
    async with loaded(team, toy, wanted, timeout=USUAL) as (head, clients):
        await clients.noticed(lambda: team.pause(0), USUAL + SLACK / 2)
        await head.served_by(second)
        await clients.end_well()
        assert any(record.message == "backup restored" for record in caplog.records)
        team.resume(0)
        await head.until(lambda: head.state(first) is MemberState.READY, "back again")
        await head.check_nothing_left()


@pytest.mark.parametrize(
    ("how", "between"),
    [
        pytest.param("cut", "workers", marks=pytest.mark.smoke),
        pytest.param("freeze", "workers", marks=pytest.mark.slow),
        pytest.param("cut", "coordinator and worker", marks=pytest.mark.slow),
        ("freeze", "coordinator and worker"),
    ],
)
@again_if_slow
async def test_a_connection(how: str, between: str, team: Team, toy: Path, wanted: Wanted) -> None:
    """A cut connection is detected at once, and a silent one after the timeout, also between two workers."""
    async with loaded(team, toy, wanted) as (head, clients):
        before, after = (team.addresses.index(address) for address in head.view.serving)
        opener = team.workers[before].pid if between == "workers" else None
        fault = getattr(team.proxies[after], how)
        limit = AT_ONCE if how == "cut" else TIMEOUT + SLACK
        serving, loads = head.view.serving, stages_loaded(team)
        await clients.noticed(lambda: fault(opener), limit)
        await clients.end_well()
        if (how, between) == ("cut", "workers"):
            assert head.view.epoch > 1
            assert (head.view.serving, stages_loaded(team)) == (serving, loads)
        team.end_faults()
        await head.until(lambda: all(head.state(a) is MemberState.READY for a in team.addresses), "both back")


def stages_loaded(team: Team) -> list[int]:
    """Return how often each worker has read weights."""
    return [len(worker.records("stage loaded")) for worker in team.workers]


@pytest.mark.slow
async def test_a_coordinator_that_was_held_up(team: Team, toy: Path, wanted: Wanted) -> None:
    """A coordinator that was blocked for longer than the timeout loses no worker."""
    async with loaded(team, toy, wanted) as (head, clients):
        asyncio.get_running_loop().call_soon(time.sleep, 1.5 * TIMEOUT)
        await clients.end_well()
        await asyncio.sleep(0.5)
        assert (head.loop.recoveries, head.view.epoch) == (0, 1)


@pytest.mark.slow
async def test_frames_slower_than_the_timeout_are_no_fault(team: Team, toy: Path, wanted: Wanted) -> None:
    """Frames that compute for longer than the timeout are no failure."""
    team.restart(1, toy)  # a process without learned times
    (request,) = requests(1, tokens=4)
    async with running_coordinator(toy, team.addresses, timeout=0.7) as head:
        wanted[repr(request)] = (await head.answer(request)).tokens
    team.restart(1, toy)
    team.set_fault(1, "slow 1.0")
    async with running_coordinator(toy, team.addresses, timeout=0.7) as head:
        assert (await head.answer(request)).tokens == wanted[repr(request)]
        assert head.loop.recoveries == 0
        assert head.view.epoch == 1


@pytest.mark.slow
async def test_a_load_that_hangs(team: Team, toy: Path) -> None:
    """A worker whose load makes no progress is lost, and the others serve."""
    first, second = team.addresses
    team.set_fault(1, "hang")
    async with running_coordinator(toy, team.addresses, timeout=1.0) as head:
        assert head.view.serving == (first,)
        assert "stuck" in head.view.members[second].reason
        assert (await head.answer(requests(1)[0])).reason == "length"


async def test_a_second_coordinator(team: Team, toy: Path) -> None:
    """A second coordinator receives the name of the first, and gets the workers when the first ends."""
    impatient = Settings(nodes=2, wait=3.0, recovery_wait=3.0, why_not_alone="it serves nothing alone here")
    async with running_coordinator(toy, team.addresses, name="first") as head:
        answer = asyncio.create_task(head.answer(requests(1)[0]))
        with pytest.raises(NotReadyError, match="serves coordinator first"):
            async with running_coordinator(toy, team.addresses, name="second", settings=impatient):
                pass
        assert (await answer).reason == "length"
        assert head.view.epoch == 1
    async with running_coordinator(toy, team.addresses, name="second") as head:
        assert (await head.answer(requests(1)[0])).reason == "length"


# ---- joining and leaving


@pytest.mark.smoke
async def test_a_worker_that_joins(team: Team, toy: Path, wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used although answers are open, and they continue."""
    monkeypatch.setattr(decide, "POSTPONED_SECONDS", 0.5)
    first, second = team.addresses
    team.proxies[1].refuse()
    alone = Settings(nodes=1, wait=40.0, recovery_wait=20.0, why_not_alone="it serves nothing alone here")
    async with loaded(team, toy, wanted, settings=alone) as (head, clients):
        assert head.view.serving == (first,)
        team.proxies[1].refuse(False)
        await head.served_by(first, second)
        await clients.end_well()


async def test_a_worker_that_leaves(team: Team, toy: Path, wanted: Wanted) -> None:
    """After SIGTERM under load the plan changes, the worker ends with status 0, and no request fails."""
    first, second = team.addresses
    async with loaded(team, toy, wanted) as (head, clients):
        leaving = team.workers[1]
        leaving.popen.send_signal(signal.SIGTERM)
        await head.served_by(first)
        await clients.end_well()
        assert await asyncio.to_thread(leaving.wait) == 0
        await head.until(lambda: head.state(second) is None, "forgotten")
    await asyncio.to_thread(team.restart, 1, toy)


@pytest.mark.thorough
async def test_a_long_prompt_goes_on_over_planned_changes(
    team: Team, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker joins while it is computed, and leaves again by SIGTERM. Nothing of it is computed twice."""
    monkeypatch.setattr(decide, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(decide, "POSTPONED_SECONDS", 0.0)
    first, second = team.addresses
    team.proxies[1].refuse()
    team.set_fault(0, "slow 0.03")
    alone = Settings(nodes=1, wait=40.0, recovery_wait=20.0, why_not_alone="it serves nothing alone here")
    asked = GenerationRequest(tuple(i % 200 + 5 for i in range(3000)), 8, SamplingParams())
    async with running_coordinator(toy, [first, second], settings=alone) as head:
        told = ReceivedAnswer()
        answer = asyncio.create_task(head.answer(asked, told))
        await head.until(lambda: len(told.prefilled) > 1, "a part of the prompt")
        team.proxies[1].refuse(False)
        await head.served_by(first, second)
        joined_at = told.prefilled[-1]
        await head.until(lambda: told.prefilled[-1] > joined_at, "a further part")
        team.workers[1].popen.send_signal(signal.SIGTERM)
        await head.served_by(first)
        left_at = told.prefilled[-1]
        assert joined_at < left_at < 3000, "the plan changed during the prompt"
        team.set_fault(0)
        await answer
    assert told.prefilled == sorted({*told.prefilled}), "a part was computed twice"
    await asyncio.to_thread(team.restart, 1, toy)


# ---- no plan


@again_if_slow
async def test_requests_that_no_plan_can_serve_end_with_the_reason(team: Team, toy: Path, wanted: Wanted) -> None:
    """If no worker returns in time, every answer ends with the reason, and later requests are served."""
    settings = Settings(nodes=2, wait=40.0, recovery_wait=2.0, why_not_alone="it serves nothing alone here")
    async with loaded(team, toy, wanted, settings=settings) as (head, clients):
        for proxy in team.proxies:
            proxy.refuse()
        started = time.monotonic()
        await clients.answers
        in_time(time.monotonic() - started, 2.0 + AT_ONCE)
        for told, tokens in zip(clients.told, clients.wanted, strict=True):
            assert told.end is not None
            assert told.reason == "error"
            assert "no plan can serve" in (told.end.error or "")
            assert told.tokens == tokens[: len(told.tokens)]
        team.end_faults()
        assert (await head.answer(requests(1)[0])).tokens == wanted[FIRST]


# ---- a coordinator that ends


def stream(url: str, model: str) -> Iterator[str]:
    """Yield the lines of one long streamed answer."""
    body = {"model": model, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        yield from reply.iter_lines()


def test_a_coordinator_that_stops(team: Team, toy: Path, tmp_path: Path) -> None:
    """After SIGTERM open streams continue for a while and end with an error event. The workers are released."""
    team.set_fault(0, "slow 0.1")
    lapsed = len(team.workers[0].records("lease expired"))
    with serving(tmp_path, toy, team.addresses, "--dtype", "float32") as coordinator:
        lines = stream(coordinator.url, toy.name)
        assert "choices" in next(line for line in lines if line.startswith("data: "))
        coordinator.popen.terminate()
        told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert coordinator.wait() == 0
    assert len(told) > 5
    assert json.loads(told[-1])["error"]["message"] == "the server is shutting down"
    assert len(team.workers[0].records("lease expired")) == lapsed


async def described(client: WorkerClient) -> tuple[pb.WorkerInfo, pb.StateReport]:
    """Return what a worker says about itself and about its sequences."""
    request = pb.StateReportRequest(coordinator=client.me)
    return await client.describe(), await client.call(client.stub.ReportState, request)


async def let_go(team: Team, seconds: float) -> None:
    """Check that the workers are released within `seconds`, hold no sequence, and keep their weights."""
    started = time.monotonic()
    for worker in team.workers:
        client = WorkerClient(worker.address, pb.Coordinator(id="onlooker", name="onlooker"))
        try:
            info, held = await described(client)
            while info.HasField("leased_to") or held.sequences:
                assert time.monotonic() < started + DEADLINE, (worker.name, info, held)
                await asyncio.sleep(0.02)
                info, held = await described(client)
            assert info.state == pb.WORKER_STATE_LOADED
        finally:
            await client.close()
    in_time(time.monotonic() - started, seconds)


@again_if_slow
async def test_a_coordinator_killed(team: Team, toy: Path, tmp_path: Path, wanted: Wanted) -> None:
    """After a kill, the workers drop their state and serve the next coordinator without a restart."""
    team.set_fault(0, "slow 0.1")

    def killed() -> None:
        flags = ("--dtype", "float32")
        with serving(tmp_path, toy, team.addresses, *flags, name="killed") as coordinator:
            lines = stream(coordinator.url, toy.name)
            assert "choices" in next(line for line in lines if line.startswith("data: "))
            coordinator.kill()
            asyncio.run(let_go(team, AT_ONCE))  # long before the lease ends
            with pytest.raises(httpx.HTTPError):
                list(lines)

    await asyncio.to_thread(killed)
    team.end_faults()
    async with loaded(team, toy, wanted) as (head, clients):
        await clients.end_well()
        assert head.view.epoch == 1
        await head.check_nothing_left()


@again_if_slow
async def test_a_coordinator_stopped(team: Team, toy: Path, tmp_path: Path) -> None:
    """After SIGSTOP and three timeouts, the workers drop the state of their coordinator."""
    await asyncio.to_thread(stop_a_coordinator, team, toy, tmp_path)


def stop_a_coordinator(team: Team, toy: Path, tmp_path: Path) -> None:
    team.set_fault(0, "slow 0.1")
    before = [len(worker.records("lease expired")) for worker in team.workers]
    flags = ("--dtype", "float32", "--failure-timeout", "1")
    with serving(tmp_path, toy, team.addresses, *flags, name="stopped") as coordinator:
        lines = stream(coordinator.url, toy.name)
        assert "choices" in next(line for line in lines if line.startswith("data: "))
        os.kill(coordinator.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            for worker, count in zip(team.workers, before, strict=True):
                worker.wait_for("lease expired", count=count + 1)
            in_time(time.monotonic() - stopped, 3.0 + SLACK)
            asyncio.run(let_go(team, AT_ONCE))
        finally:
            coordinator.kill()  # a stopped process ignores SIGTERM
