"""Checks of the network and the workers: discovery and versions."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.doctor.finding import CommandOutput, Finding, Verdict, command_output, judged
from coordinator.pipeline.worker_client import Candidate, ConnectionPolicy, connect_worker
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, VersionError
from proto.rpc.status_codes import printable
from proto.terminal.progress import format_size


def check_discovery(
    candidates: Sequence[Candidate], *, enabled: bool, problem: str, seconds: float
) -> Finding:
    """Report the announced workers. `problem` is the error of the mDNS browser, empty for none."""
    announced = [c for c in candidates if c.announcement is not None]
    values = {"found": [c.name for c in announced], "problem": problem}
    if not enabled:
        return Finding("mDNS", Verdict.SKIP, "off by --no-mdns", "", values)
    if problem:
        advice = "mDNS is unavailable here. Name each worker with --worker HOST:PORT."
        return judged("mDNS", problem, advice, values)
    if not candidates:
        advice = (
            "No worker was found. Start mtp-worker on each machine. If it runs, pass --worker HOST:PORT: the "
            "network or macOS's Local Network privacy may block multicast."
        )
        return judged("mDNS", f"no worker in {seconds:g} s", advice, values)
    lines = ", ".join(f"{c.name} at {c.addresses[0]}" for c in announced)
    return judged("mDNS", lines or "no worker besides those of --worker", "", values)


def check_bridge(workers: int, output: CommandOutput = command_output) -> Finding:
    """Report a Thunderbolt Bridge of two or more cables, which three Macs in a ring turn into a loop."""
    if sys.platform != "darwin":
        return Finding("Thunderbolt Bridge", Verdict.SKIP, "only on macOS")
    members = re.findall(r"member: (\w+)", output("ifconfig", "bridge0"))
    active = [m for m in members if "status: active" in output("ifconfig", m)]
    values = {"members": members, "active": active}
    figure = f"{len(active)} of {len(members)} ports in use" if members else "none"
    advice = (
        "The bridge has no loop protection: three Macs in a ring flood the network. Connect them in a chain, or "
        "remove the bridge and give each cable its own subnet (deploy/README.md)."
    )
    ring = len(active) > 1 and workers > 1
    return judged("Thunderbolt Bridge", figure, advice if ring else "", values)


MAX_VERSION = 100
"""Characters of the versions that a worker reports."""

DESCRIBE_SECONDS = 10.0
"""Seconds. Longest wait for one description."""


@dataclass(frozen=True)
class ReachedWorker:
    """A worker that described itself.

    `version` has the versions of its programs.
    """

    name: str
    address: str
    version: str = ""


async def check_worker(
    candidate: Candidate, model: pb.ModelRef, me: pb.Coordinator, policy: ConnectionPolicy
) -> tuple[ReachedWorker | None, Finding]:
    """Ask a candidate at its addresses, in order, until one answers. Return the worker, None if no address does."""
    errors: list[ClusterError] = []
    for address in candidate.addresses:
        try:
            client, info = await connect_worker(
                policy, candidate, address, me, model, timeout=DESCRIBE_SECONDS
            )
        except ClusterError as error:
            errors.append(error)
            continue
        await client.close()
        worker = ReachedWorker(
            info.name,
            address,
            printable(info.version, MAX_VERSION),
        )
        return worker, _described(info, address, model)
    return None, _unreachable(candidate, errors)


def _described(info: pb.WorkerInfo, address: str, model: pb.ModelRef) -> Finding:
    limit = info.hardware.memory_limit
    figure = f"{address}, {info.hardware.chip}, {format_size(limit)}"
    values = {
        "address": address,
        "chip": info.hardware.chip,
        "memory_limit": limit,
        "bytes_per_second": info.hardware.bytes_per_second,
        "model": info.model,
        "fingerprint": info.fingerprint[:12],
        "version": printable(info.version, MAX_VERSION),
    }
    if info.model and info.fingerprint != model.fingerprint:
        advice = f"It has another checkpoint ({info.model}). Give both programs the same --model."
        return judged(f"worker {info.name}", figure, advice, values)
    return judged(f"worker {info.name}", figure, "", values)


def _unreachable(candidate: Candidate, errors: Sequence[ClusterError]) -> Finding:
    error = errors[-1]
    text = str(error)
    if isinstance(error, VersionError):
        advice = "Install the same release on every machine."
    elif "refused" in text:
        advice = "No worker listens there. Start mtp-worker with --listen on that address."
    elif "LaunchDaemon" in text:
        advice = "macOS blocks the connection. See docs/first-mac.md."
    else:
        advice = "Check the address, the cable and the firewall, and that mtp-worker runs there."
    return Finding(f"worker {candidate.name}", Verdict.FAIL, text, advice, {"error": text})


def check_equal_versions(own: str, workers: Sequence[ReachedWorker]) -> Finding:
    """Compare the versions of the programs on every machine, which decide the arithmetic, with `own`."""
    other = {w.name: w.version or "unknown" for w in workers if w.version != own}
    values = {"own": own, "others": other}
    if not other:
        return judged("versions of the workers", f"{own}, here and in all workers", "", values)
    names = "; ".join(f"{name}: {version}" for name, version in other.items())
    advice = (
        "Install the same release on every machine, with its pinned packages. Other versions of MLX round "
        "differently."
    )
    return judged("versions of the workers", f"{own} here; {names}", advice, values)
