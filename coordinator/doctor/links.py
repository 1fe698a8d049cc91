"""Links from this machine to each worker, and between workers, which send frames to each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import grpc.aio

from coordinator.doctor.finding import Finding, Verdict
from coordinator.doctor.workers import ReachedWorker
from proto.errors import ClusterError
from proto.rpc.channels import open_channel
from proto.rpc.link_test import REACH, LinkFigures, measure_link
from proto.rpc.status_codes import from_status
from proto.trust.identity import Role

SLOW_SECONDS = 2e-3
"""Seconds. Round trip of 20 KB above which a hop costs a noticeable part of a token."""

SLOW_BYTES_PER_SECOND = 100e6
"""Bytes a second. Gigabit Ethernet reaches 110 MB/s, and slower links delay prompts."""

UNSTEADY, UNSTEADY_SECONDS = 5.0, 10e-3
"""Ratio of p99 to p50, and seconds of p99, above which a link is unsteady. A busy machine alone reaches 3 ms."""

CLOCK_SECONDS = 2.0
"""Seconds. A larger clock offset makes the logs of two machines hard to compare."""

REACH_SECONDS = 45.0
"""Seconds. Longest measurement between two workers, the opening of the connection included."""


async def check_link(worker: ReachedWorker) -> Finding:
    """Measure the link from this machine to `worker`."""
    channel = open_channel(worker.address, worker.trust, Role.WORKER, worker.node)
    try:
        return judge(f"link to {worker.name}", await measure_link(channel))
    except grpc.aio.AioRpcError as error:
        return _failure(f"link to {worker.name}", _translated(error, worker.address))
    except ClusterError as error:
        return _failure(f"link to {worker.name}", error)
    finally:
        await channel.close()


async def check_hop(sender: ReachedWorker, receiver: ReachedWorker) -> Finding:
    """Have `sender` measure its link to `receiver`, which a plan may use as a hop."""
    name = f"hop from {sender.name} to {receiver.name}"
    channel = open_channel(sender.address, sender.trust, Role.WORKER, sender.node)
    request = json.dumps({"address": receiver.address, "node": receiver.node}).encode()
    try:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(REACH)
        return judge(name, LinkFigures.decode(await method(request, timeout=REACH_SECONDS)))
    except grpc.aio.AioRpcError as error:
        return _failure(name, _translated(error, sender.address))
    except ClusterError as error:
        return _failure(name, error)
    finally:
        await channel.close()


def judge(name: str, figures: LinkFigures) -> Finding:
    """Return the finding for measured figures."""
    megabytes = figures.bytes_per_second / 1e6
    figure = (
        f"{figures.p50 * 1e3:.2f} ms, p99 {figures.p99 * 1e3:.2f} ms, {megabytes:.0f} MB/s, "
        f"clock {figures.clock_offset:+.1f} s"
    )
    advice = []
    unsteady = figures.p99 > UNSTEADY * figures.p50 and figures.p99 > UNSTEADY_SECONDS
    if figures.p50 > SLOW_SECONDS or unsteady:
        advice.append("Each token waits for this link. Use a cable instead of Wi-Fi.")
    if figures.bytes_per_second < SLOW_BYTES_PER_SECOND:
        advice.append("Prompts wait for this link. Use Thunderbolt, or at least Gigabit Ethernet.")
    if abs(figures.clock_offset) > CLOCK_SECONDS:
        advice.append("The clocks differ. Turn on automatic time on both machines.")
    verdict = Verdict.WARN if advice else Verdict.OK
    return Finding(name, verdict, figure, " ".join(advice), asdict(figures))


def _failure(name: str, error: ClusterError) -> Finding:
    advice = "Start both machines' programs with addresses that reach each other, and check the firewall."
    return Finding(name, Verdict.FAIL, str(error), advice)


def _translated(error: grpc.aio.AioRpcError, address: str) -> ClusterError:
    metadata: Any = error.trailing_metadata()
    return from_status(error.code().name, error.details(), metadata, address)
