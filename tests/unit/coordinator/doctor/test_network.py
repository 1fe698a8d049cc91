"""Discovery, routes and links in the doctor's report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.doctor.balance import check_balance
from coordinator.doctor.discovery import check_discovery
from coordinator.doctor.finding import Verdict
from coordinator.doctor.links import check_hop, check_link, judge
from coordinator.doctor.route import check_bridge, check_route
from coordinator.doctor.workers import (
    ReachedWorker,
    check_equal_checkpoints,
    check_equal_chips,
    check_equal_versions,
    check_worker,
)
from coordinator.workers.connection import ConnectionPolicy
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.frame import VERSION
from proto.rpc import link_test
from proto.rpc.link_test import LinkFigures, acknowledge
from tests.support.processes.stub_worker import stub_worker
from worker.node.link_test import LinkTestService

GOOD = LinkFigures(0.4e-3, 0.9e-3, 1.1e9, 0.0)

BRIDGE = """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 8 priority 0 path cost 0
\tmember: en3 flags=3<LEARNING,DISCOVER>
\tstatus: active
"""


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to run on macOS."""
    monkeypatch.setattr("sys.platform", "darwin")


@pytest.mark.parametrize(
    ("interface", "kind", "verdict"),
    [
        ("bridge0", "Thunderbolt Bridge", Verdict.OK),
        ("en0", "Ethernet", Verdict.OK),
        ("en1", "Wi-Fi", Verdict.WARN),
    ],
)
def test_the_interface_of_a_route_is_named(interface: str, kind: str, verdict: Verdict) -> None:
    """The route's interface and its kind are reported, and Wi-Fi is a warning."""
    finding = check_route("mac-2", "10.0.0.2:50505", lambda host: (interface, kind))
    assert (finding.figure, finding.verdict) == (f"{interface} ({kind})", verdict)


@pytest.mark.parametrize(
    ("active", "workers", "verdict"),
    [({"en2", "en3"}, 2, Verdict.WARN), ({"en2", "en3"}, 1, Verdict.OK), ({"en2"}, 2, Verdict.OK)],
)
@pytest.mark.usefixtures("mac")
def test_a_bridge_that_may_be_a_ring_is_named(
    active: set[str], workers: int, verdict: Verdict
) -> None:
    """A Thunderbolt Bridge with two cables in use and several workers is a warning."""

    def output(*command: str) -> str:
        if command[-1] == "bridge0":
            return BRIDGE
        return f"status: {'active' if command[-1] in active else 'inactive'}"

    finding = check_bridge(workers, output)
    assert finding.verdict is verdict
    assert finding.values["members"] == ["en2", "en3"]


def test_a_route_to_this_machine_needs_no_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of this machine has no interface, and Linux has no Thunderbolt Bridge."""
    monkeypatch.setattr("sys.platform", "linux")
    assert check_route("w", "127.0.0.1:1").figure == "this machine"
    assert check_bridge(3).verdict is Verdict.SKIP


@pytest.mark.parametrize(
    ("figures", "verdict", "words"),
    [
        (GOOD, Verdict.OK, ""),
        (LinkFigures(8e-3, 9e-3, 1.1e9, 0.0), Verdict.WARN, "cable"),
        (LinkFigures(1e-3, 60e-3, 1.1e9, 0.0), Verdict.WARN, "cable"),
        (LinkFigures(0.4e-3, 0.9e-3, 30e6, 0.0), Verdict.WARN, "Thunderbolt"),
        (LinkFigures(0.4e-3, 0.9e-3, 1.1e9, -90.0), Verdict.WARN, "clocks"),
    ],
)
def test_a_slow_link_and_a_wrong_clock_are_named(
    figures: LinkFigures, verdict: Verdict, words: str
) -> None:
    """Latency, jitter, speed and clock offset each have their own advice."""
    finding = judge("link", figures)
    assert finding.verdict is verdict
    assert words in finding.advice


@asynccontextmanager
async def link_server(delay: float = 0.0) -> AsyncIterator[ReachedWorker]:
    """Run a server of the link test on loopback that answers each message after `delay` seconds."""

    class Slow(LinkTestService):
        async def stream(
            self, messages: AsyncIterator[bytes], context: Any
        ) -> AsyncIterator[bytes]:
            async for reply in acknowledge(messages):
                await asyncio.sleep(delay)
                yield reply

    server = grpc.aio.server(options=link_test_options())
    server.add_generic_rpc_handlers((Slow(None).handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield ReachedWorker(f"w{port}", f"127.0.0.1:{port}", None, "", "Apple M4")
    finally:
        await server.stop(0)


def link_test_options() -> tuple[tuple[str, int], ...]:
    """Return the options of a worker's server, which accept large messages."""
    from proto.rpc.data_plane import CHANNEL_OPTIONS

    return CHANNEL_OPTIONS


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with few messages."""
    measure = link_test.measure_link

    async def few(channel: grpc.aio.Channel) -> LinkFigures:
        return await measure(channel, small_count=10, large_count=2)

    monkeypatch.setattr("coordinator.doctor.links.measure_link", few)
    monkeypatch.setattr("worker.node.link_test.measure_link", few)


@pytest.mark.usefixtures("short")
async def test_a_link_is_measured_over_the_real_stream() -> None:
    """Over loopback the figures are plausible and the clock is the same."""
    async with link_server() as worker:
        values = (await check_link(worker)).values
    assert 0 < values["p50"] <= values["p99"] < 1
    assert values["bytes_per_second"] > 1e6
    assert abs(values["clock_offset"]) < 0.5


@pytest.mark.usefixtures("short")
async def test_an_injected_delay_is_found() -> None:
    """A receiver that answers 20 ms late makes the link a warning with that latency."""
    async with link_server(delay=0.02) as worker:
        finding = await check_link(worker)
    assert finding.verdict is Verdict.WARN
    assert finding.values["p50"] >= 0.02


@pytest.mark.usefixtures("short")
async def test_a_worker_measures_its_link_to_another_worker() -> None:
    """The hop between two workers is measured by the sender, and a closed port is named with its address."""
    async with link_server() as sender:
        async with link_server() as receiver:
            finding = await check_hop(sender, receiver)
        assert finding.values["p50"] > 0
        finding = await check_hop(sender, receiver)
    assert finding.verdict is Verdict.FAIL
    assert receiver.address in finding.figure


async def test_a_closed_port_is_named() -> None:
    """A link to an address where nothing listens fails with the cause."""
    async with link_server() as worker:
        pass
    assert (await check_link(worker)).verdict is Verdict.FAIL


ME = pb.Coordinator(id="c", name="doctor")
MODEL = pb.ModelRef(name="m", fingerprint="f" * 64)


async def ask(address: str) -> Any:
    """Check the worker at `address`."""
    return await check_worker(Candidate(address, (address,)), MODEL, ME, ConnectionPolicy())


async def test_another_release_and_another_checkpoint_are_named() -> None:
    """A worker of another release fails, and one with another checkpoint warns."""
    with stub_worker("old", version=VERSION + 1) as address:
        worker, finding = await ask(address)
        assert worker is None
        assert (finding.verdict, "same release" in finding.advice) == (Verdict.FAIL, True)
    with stub_worker("other", fingerprint="0" * 64) as address:
        worker, finding = await ask(address)
        assert worker.address == address
        assert (finding.verdict, "another checkpoint" in finding.advice) == (Verdict.WARN, True)
    worker, finding = await ask(address)
    assert worker is None
    assert "No worker listens there" in finding.advice


def test_unlike_chips_are_named() -> None:
    """Workers with different chips get a warning, and equal ones do not."""
    one, other = (ReachedWorker("w", "a:1", None, "", f"Apple {chip}") for chip in ("M2", "M4"))
    assert check_equal_chips([one, one]).verdict is Verdict.OK
    assert check_equal_chips([one, other]).verdict is Verdict.WARN


def test_other_versions_and_checkpoints_are_named() -> None:
    """A worker with other packages or other weights is named, and one without files is not a fault."""
    same = ReachedWorker("same", "a:1", None, "", "Apple M4", "1.0, mlx 0.32.4", "f" * 64)
    other = replace(same, name="other", version="1.0, mlx 0.31.0", fingerprint="0" * 64)
    silent = replace(same, name="silent", version="", fingerprint="")
    assert check_equal_versions(same.version, [same]).verdict is Verdict.OK
    finding = check_equal_versions(same.version, [same, other, silent])
    assert finding.verdict is Verdict.WARN
    assert finding.values["others"] == {"other": other.version, "silent": "unknown"}
    assert check_equal_checkpoints("f" * 64, [same]).verdict is Verdict.OK
    finding = check_equal_checkpoints("f" * 64, [same, silent])
    assert (finding.verdict, "1 would fetch" in finding.figure) == (Verdict.OK, True)
    finding = check_equal_checkpoints("f" * 64, [same, other])
    assert (finding.verdict, "other has other weights" in finding.advice) == (Verdict.WARN, True)


def stage(name: str, ms: float, weights: float, speed: float = 100e9) -> dict[str, Any]:
    """Return a node of `/status` with a stage."""
    return {"name": name, "stage_ms": ms, "weight_bytes": weights, "bytes_per_second": speed}


@pytest.mark.parametrize(
    ("stages", "verdict", "words"),
    [
        ([stage("a", 11, 1e9), stage("b", 12, 1e9)], Verdict.OK, ""),
        ([stage("a", 22, 2e9, 400e9), stage("b", 12, 1e9)], Verdict.WARN, "a is slower"),
        ([stage("a", 11, 1e9), stage("b", 12, 1e9), stage("c", 30, 1e9)], Verdict.WARN, "c is"),
        ([stage("a", 5, 1e9), stage("b", 40, 8e9)], Verdict.WARN, "others wait"),
        ([stage("a", 11, 1e9)], Verdict.SKIP, ""),
        ([stage("a", 11, 1e9), stage("idle", 0, 0)], Verdict.SKIP, ""),
    ],
)
def test_a_stage_that_is_slower_than_planned_is_named(
    stages: list[dict[str, Any]], verdict: Verdict, words: str
) -> None:
    """A stage above its expected time, and a plan whose slowest stage lets the others wait, are warnings."""
    finding = check_balance(stages)
    assert finding.verdict is verdict
    assert words in finding.advice


@pytest.mark.parametrize(
    ("enabled", "problem", "verdict", "words"),
    [
        (False, "", Verdict.SKIP, ""),
        (True, "OSError: [Errno 48] Address already in use", Verdict.WARN, "mDNS is unavailable"),
        (True, "", Verdict.WARN, "No worker was found"),
    ],
)
def test_the_reason_for_silent_mdns_is_named(
    enabled: bool, problem: str, verdict: Verdict, words: str
) -> None:
    """An mDNS socket in use, and a network without answers, each have their own advice."""
    finding = check_discovery([], enabled=enabled, problem=problem, seconds=3)
    assert finding.verdict is verdict
    assert words in finding.advice
