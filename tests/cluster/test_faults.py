"""One fault at a time, on real processes: noticed in time, and no answer is other than it would have been."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from coordinator.cluster import manager
from coordinator.cluster.apply import apply
from coordinator.cluster.events import Event
from coordinator.cluster.member import MemberState
from coordinator.cluster.options import ManagerOptions
from coordinator.cluster.view import Phase, Settings, View
from coordinator.generation.request import GenerationRequest
from coordinator.workers.client import WorkerClient
from proto import cluster_pb2 as pb
from proto.errors import NotReadyError
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.processes.in_process_coordinator import (
    DEADLINE,
    TIMEOUT,
    InProcessCoordinator,
    ReceivedAnswer,
    requests,
    running_coordinator,
)
from tests.support.processes.processes import as_worker, serving
from tests.support.processes.team import Team, running_team

pytestmark = pytest.mark.chaos

Wanted = dict[str, list[int]]
"""Tokens by what was asked."""

SLACK = 1.5
"""Seconds over the failure timeout that two busy cores may cost."""

USUAL = ManagerOptions.failure_timeout
"""What users have: two faults are tried with it."""

AT_ONCE = 1.5
"""What breaks tells of itself: no timeout has to pass."""

FIRST = repr(requests(1)[0])

LOADED = 5
"""Tokens every client has when the fault comes."""

TRIES = 3
"""What takes too long three times in a row is no hiccup of a machine that others use."""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[Team]:
    with running_team(tmp_path_factory.mktemp("team"), toy, 2) as team:
        yield team


@pytest.fixture(autouse=True)
def healthy(team: Team) -> Iterator[None]:
    """Every test finds the workers well."""
    yield
    team.end_faults()


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    """What undisturbed answers were."""
    return {}


class SlowError(AssertionError):
    """All is as it should be, but for the time it took."""


def in_time(seconds: float, limit: float) -> None:
    """Raises SlowError when it took longer than it may."""
    if seconds >= limit:
        raise SlowError(f"it took {seconds:.2f} s, and {limit:.2f} s are too long")


def again_if_slow(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test whose times may be over their limits now and then; all else it finds is final."""

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
    """Clients that have had some tokens each and wait for more."""

    head: InProcessCoordinator
    told: list[ReceivedAnswer]
    answers: asyncio.Future[list[ReceivedAnswer]]
    wanted: list[list[int]]

    async def noticed(self, fault: Callable[[], None], limit: float) -> None:
        """Inject a fault; the plan is given up within so many seconds."""
        pipeline = self.head.manager.pipeline
        fault()
        seconds = await self.head.until(
            lambda: self.head.manager.pipeline is not pipeline, "the fault was noticed"
        )
        in_time(seconds, limit)

    async def end_well(self) -> None:
        """All answers end, and are what they would have been."""
        await self.answers
        assert [t.reason for t in self.told] == ["length"] * len(self.told)
        assert [t.tokens for t in self.told] == self.wanted


@asynccontextmanager
async def load(
    head: InProcessCoordinator, wanted: Wanted, asked: list[GenerationRequest]
) -> AsyncIterator[Load]:
    """Clients under way on a healthy cluster; inside, something happens to it."""
    for request in asked:
        if repr(request) not in wanted:
            wanted[repr(request)] = (await head.answer(request)).tokens
    await head.answers(asked)  # together: the engines have seen frames of such a size
    told = [ReceivedAnswer() for _ in asked]
    answers = asyncio.gather(*(head.answer(r, t) for r, t in zip(asked, told, strict=True)))
    try:
        await head.until(lambda: all(len(t.tokens) >= LOADED for t in told), "tokens for all")
        yield Load(head, told, answers, [wanted[repr(request)] for request in asked])
    finally:
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)


# ---- what is noticed, and when


@again_if_slow
async def test_an_engine_that_is_stuck(team: Team, toy: Path, wanted: Wanted) -> None:
    """It answers heartbeats and computes nothing: lost within the timeout, shown why, used again once it is well."""
    first, second = team.addresses
    async with (
        running_coordinator(toy, team.addresses, timeout=USUAL) as head,
        load(head, wanted, requests()) as clients,
    ):
        await clients.noticed(lambda: team.set_fault(1, "stuck"), USUAL + SLACK / 2)
        await head.served_by(first)
        await clients.end_well()
        member = head.view.members[second]
        assert "stuck" in member.reason
        team.set_fault(1)
        await head.until(lambda: head.state(second) is MemberState.READY, "back again")
        await head.check_nothing_left()


@again_if_slow
async def test_a_worker_that_is_stopped(team: Team, toy: Path, wanted: Wanted) -> None:
    """SIGSTOP: its connections stand and nobody speaks. Continued, it drops what it held and joins again."""
    first, second = team.addresses
    async with (
        running_coordinator(toy, team.addresses, timeout=USUAL) as head,
        load(head, wanted, requests()) as clients,
    ):
        await clients.noticed(lambda: team.pause(0), USUAL + SLACK / 2)
        await head.served_by(second)
        await clients.end_well()
        team.resume(0)
        await head.until(lambda: head.state(first) is MemberState.READY, "back again")
        await head.check_nothing_left()


@pytest.mark.parametrize(
    ("how", "between"),
    [
        ("cut", "workers"),
        ("freeze", "workers"),
        pytest.param("cut", "coordinator and worker", marks=pytest.mark.slow),
        ("freeze", "coordinator and worker"),
    ],
)
@again_if_slow
async def test_a_connection(
    how: str,
    between: str,
    team: Team,
    toy: Path,
    wanted: Wanted,
) -> None:
    """Cut, it is noticed at once; gone silent, after the timeout. Between workers, too, where both are well:
    cut, they serve on with the weights they have."""
    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests()) as clients,
    ):
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
        await head.until(
            lambda: all(head.state(a) is MemberState.READY for a in team.addresses), "both back"
        )


def stages_loaded(team: Team) -> list[int]:
    """How often each worker has read weights."""
    return [len(worker.records("stage loaded")) for worker in team.workers]


@pytest.mark.slow
async def test_a_coordinator_that_was_held_up(team: Team, toy: Path, wanted: Wanted) -> None:
    """It did not listen for longer than the timeout: that is no reason to take its workers for lost."""
    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests()) as clients,
    ):
        asyncio.get_running_loop().call_soon(time.sleep, 1.5 * TIMEOUT)
        await clients.end_well()
        await asyncio.sleep(0.5)
        assert (head.loop.recoveries, head.view.epoch) == (0, 1)


@pytest.mark.slow
async def test_frames_slower_than_the_timeout_are_no_fault(
    team: Team, toy: Path, wanted: Wanted
) -> None:
    """A slow machine computes: what its frames take is learned from the first, and nobody is lost."""
    team.restart(1, toy)  # one that has learned nothing
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
    """The first plan's load makes no progress on one worker: it is lost, and the others serve."""
    first, second = team.addresses
    team.set_fault(1, "hang")
    async with running_coordinator(toy, team.addresses, timeout=1.0) as head:
        assert head.view.serving == (first,)
        assert "stuck" in head.view.members[second].reason
        assert (await head.answer(requests(1)[0])).reason == "length"


# ---- who may serve


async def test_a_worker_that_fails_again_and_again(team: Team, toy: Path, wanted: Wanted) -> None:
    """Used again at once the first time; then held back, longer each time, and shown so."""
    first, second = team.addresses
    holds: dict[int, float] = {}

    def noting(view: View, event: Event, now: float) -> View:
        """Seconds it is held back from its so manieth loss on."""
        after = apply(view, event, now)
        if (member := after.members.get(second)) and member.failure_count:
            holds.setdefault(member.failure_count, member.backoff_until - now)
        return after

    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests(2)) as clients,
    ):
        with patch.object(manager, "apply", noting):
            team.set_fault(1, "raise")
            await head.until(lambda: 2 in holds, "blamed twice")
        assert holds[1] <= 0.0
        assert holds[2] == pytest.approx(2.0)
        (node,) = (n for n in head.status.status().nodes if n.address == second)
        assert (node.health, node.detail[:9]) == ("idle", "held back")
        await head.served_by(first)
        await clients.end_well()
        await head.until(lambda: head.view.members[second].usable(head.view.now), "released")
        head.manager.replan()
        await head.served_by(first, second)
        with patch.object(manager, "apply", noting):
            again = asyncio.create_task(head.answer(requests(1)[0]))
            await head.until(lambda: 3 in holds, "blamed again")
        assert holds[3] == pytest.approx(4.0)
        assert (await again).tokens == wanted[FIRST]


async def test_a_second_coordinator(team: Team, toy: Path) -> None:
    """It is told who holds the workers, and the first goes on undisturbed; when that leaves, it may have them."""
    impatient = Settings(
        nodes=2, wait=3.0, recovery_wait=3.0, why_not_alone="it serves nothing alone here"
    )
    async with running_coordinator(toy, team.addresses, name="first") as head:
        answer = asyncio.create_task(head.answer(requests(1)[0]))
        with pytest.raises(NotReadyError, match="serves coordinator first"):
            async with running_coordinator(toy, team.addresses, name="second", settings=impatient):
                pass
        assert (await answer).reason == "length"
        assert head.view.epoch == 1
    async with running_coordinator(toy, team.addresses, name="second") as head:
        assert (await head.answer(requests(1)[0])).reason == "length"


@again_if_slow
async def test_a_worker_back_with_another_checkpoint(
    team: Team, toy: Path, tmp_path: Path, wanted: Wanted
) -> None:
    """Killed, noticed at once, and back with other weights at the same address: refused, and the answers stay."""
    first, second = team.addresses
    other = write_checkpoint(tmp_path / "other", seed=9)
    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests()) as clients,
    ):
        await clients.noticed(team.workers[1].kill, AT_ONCE)
        launched = team.launch_again(1, other)
        await head.served_by(first)
        await clients.end_well()
        team.workers[1] = await asyncio.to_thread(as_worker, launched)
        await head.until(lambda: head.state(second) is MemberState.REFUSED, "refused")
        assert "another checkpoint" in head.view.members[second].reason
        head.manager.replan()
        assert (await head.answer(requests(1)[0])).tokens == wanted[FIRST]
        assert head.view.serving == (first,)
    await asyncio.to_thread(team.restart, 1, toy)


# ---- joining and leaving


async def test_a_worker_that_joins(team: Team, toy: Path, wanted: Wanted) -> None:
    """It disturbs nobody by coming; asked for, the next plan uses it, and the answers go on."""
    first, second = team.addresses
    team.proxies[1].refuse()
    alone = Settings(
        nodes=1, wait=40.0, recovery_wait=20.0, why_not_alone="it serves nothing alone here"
    )
    async with (
        running_coordinator(toy, team.addresses, settings=alone) as head,
        load(head, wanted, requests()) as clients,
    ):
        assert head.view.serving == (first,)
        team.proxies[1].refuse(False)
        await head.until(lambda: head.state(second) is MemberState.READY, "joined")
        assert (head.view.serving, head.view.epoch) == ((first,), 1)
        head.manager.replan()
        await head.served_by(first, second)
        await clients.end_well()


async def test_a_worker_told_to_leave(team: Team, toy: Path, wanted: Wanted) -> None:
    """SIGTERM under load: the plan changes, then it goes, with status 0; no request fails, and it is forgotten."""
    first, second = team.addresses
    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests()) as clients,
    ):
        leaving = team.workers[1]
        leaving.popen.send_signal(signal.SIGTERM)
        await head.served_by(first)
        await clients.end_well()
        assert await asyncio.to_thread(leaving.wait) == 0
        await head.until(lambda: head.state(second) is None, "forgotten")
    await asyncio.to_thread(team.restart, 1, toy)


# ---- when nothing can serve


@again_if_slow
async def test_requests_wait_for_a_plan(team: Team, toy: Path, wanted: Wanted) -> None:
    """All workers are out of reach for a while: what was running goes on, what came meanwhile is answered."""
    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests()) as clients,
    ):

        def fault() -> None:
            for proxy in team.proxies:
                proxy.refuse()

        await clients.noticed(fault, AT_ONCE)
        late = asyncio.create_task(head.answer(requests(1)[0]))
        await head.until(lambda: head.view.phase is Phase.GATHERING, "it waits for workers")
        await asyncio.sleep(1.0)
        assert head.view.phase is Phase.GATHERING
        assert not late.done()
        team.end_faults()
        await clients.end_well()
        assert (await late).tokens == wanted[FIRST]


@again_if_slow
async def test_what_no_plan_can_serve_is_told(team: Team, toy: Path, wanted: Wanted) -> None:
    """Nobody comes back in time: every answer ends with an error that says why, and later ones are served."""
    settings = Settings(
        nodes=2, wait=40.0, recovery_wait=2.0, why_not_alone="it serves nothing alone here"
    )
    async with (
        running_coordinator(toy, team.addresses, settings=settings) as head,
        load(head, wanted, requests()) as clients,
    ):
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
    """Lines of one long streamed answer."""
    body = {"model": model, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        yield from reply.iter_lines()


def test_a_coordinator_told_to_stop(team: Team, toy: Path, tmp_path: Path) -> None:
    """SIGTERM under load: open streams go on for a while, then end with an error event; status 0, workers freed."""
    team.set_fault(0, "slow 0.1")
    lapsed = len(team.workers[0].records("claim lapsed"))
    with serving(tmp_path, toy, team.addresses, "--dtype", "float32") as coordinator:
        lines = stream(coordinator.url, toy.name)
        assert "choices" in next(line for line in lines if line.startswith("data: "))
        coordinator.popen.terminate()
        told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert coordinator.wait() == 0
    assert len(told) > 5
    assert json.loads(told[-1])["error"]["message"] == "the server is shutting down"
    assert len(team.workers[0].records("claim lapsed")) == lapsed


async def let_go(team: Team, seconds: float) -> None:
    """Within so many seconds nobody claims the workers and they hold no sequence; their weights stay."""
    started = time.monotonic()
    for worker in team.workers:
        client = WorkerClient(worker.address, pb.Coordinator(id="onlooker", name="onlooker"))
        try:
            info, held = await client.describe(), await client.report_state()
            while info.HasField("leased_to") or held.sequences:
                assert time.monotonic() < started + DEADLINE, (worker.name, info, held)
                await asyncio.sleep(0.02)
                info, held = await client.describe(), await client.report_state()
            assert info.state == pb.WORKER_STATE_LOADED
        finally:
            await client.close()
    in_time(time.monotonic() - started, seconds)


@again_if_slow
async def test_a_coordinator_killed(team: Team, toy: Path, tmp_path: Path, wanted: Wanted) -> None:
    """Its streams are cut, but its workers drop what they held and serve the next one, without being started anew."""
    team.set_fault(0, "slow 0.1")

    def killed() -> None:
        flags = ("--dtype", "float32")
        with serving(tmp_path, toy, team.addresses, *flags, name="killed") as coordinator:
            lines = stream(coordinator.url, toy.name)
            assert "choices" in next(line for line in lines if line.startswith("data: "))
            coordinator.kill()
            asyncio.run(let_go(team, AT_ONCE))  # long before its lease ends
            with pytest.raises(httpx.HTTPError):
                list(lines)

    await asyncio.to_thread(killed)
    team.end_faults()
    async with (
        running_coordinator(toy, team.addresses) as head,
        load(head, wanted, requests()) as clients,
    ):
        await clients.end_well()
        assert head.view.epoch == 1
        await head.check_nothing_left()


@again_if_slow
async def test_a_coordinator_stopped(team: Team, toy: Path, tmp_path: Path) -> None:
    """SIGSTOP: its connections stand and nobody speaks. After three timeouts its workers drop what they held for it."""
    await asyncio.to_thread(stop_a_coordinator, team, toy, tmp_path)


def stop_a_coordinator(team: Team, toy: Path, tmp_path: Path) -> None:
    team.set_fault(0, "slow 0.1")
    before = [len(worker.records("claim lapsed")) for worker in team.workers]
    flags = ("--dtype", "float32", "--failure-timeout", "1")
    with serving(tmp_path, toy, team.addresses, *flags, name="stopped") as coordinator:
        lines = stream(coordinator.url, toy.name)
        assert "choices" in next(line for line in lines if line.startswith("data: "))
        os.kill(coordinator.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            for worker, count in zip(team.workers, before, strict=True):
                worker.wait_for("claim lapsed", count=count + 1)
            in_time(time.monotonic() - stopped, 3.0 + SLACK)
            asyncio.run(let_go(team, AT_ONCE))
        finally:
            coordinator.kill()  # it would hear no SIGTERM
