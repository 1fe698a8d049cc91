"""The workers that answer, with their releases and their copies of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.doctor.finding import Finding, Verdict
from coordinator.workers.connection import ConnectionPolicy, connect_worker
from coordinator.workers.discovery import Candidate
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, VersionError
from proto.rpc.grpc_text import printable
from proto.terminal.size import format_size
from proto.trust.node_trust import NodeTrust

MAX_VERSION = 100
"""Characters of the versions that a worker reports."""

DESCRIBE_SECONDS = 10.0
"""Seconds. Longest wait for one description."""


@dataclass(frozen=True)
class ReachedWorker:
    """A worker that described itself. `trust` and `node` are those of its connection.

    `version` has the versions of its programs, and `fingerprint` is that of its copy of the model, if it has one.
    """

    name: str
    address: str
    trust: NodeTrust | None
    node: str
    chip: str
    version: str = ""
    fingerprint: str = ""


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
            client.trust,
            client.node,
            info.hardware.chip,
            printable(info.version, MAX_VERSION),
            info.fingerprint,
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
        return Finding(f"worker {info.name}", Verdict.WARN, figure, advice, values)
    return Finding(f"worker {info.name}", Verdict.OK, figure, "", values)


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
        figure = f"{own} on all {len(workers) + 1} machines"
        return Finding("versions of the workers", Verdict.OK, figure, "", values)
    names = "; ".join(f"{name}: {version}" for name, version in other.items())
    advice = (
        "Install the same release on every machine, with its pinned packages. Other versions of MLX round "
        "differently."
    )
    figure = f"{own} here; {names}"
    return Finding("versions of the workers", Verdict.WARN, figure, advice, values)


def check_equal_checkpoints(own: str, workers: Sequence[ReachedWorker]) -> Finding:
    """Compare the workers' checkpoints with the fingerprint `own`. A worker without files fetches its layers."""
    names = {w.name: w.fingerprint for w in workers if w.fingerprint}
    other = sorted(name for name, fingerprint in names.items() if fingerprint != own)
    values = {"own": own[:12], "others": {name: print_[:12] for name, print_ in names.items()}}
    without = len(workers) - len(names)
    figure = f"{len(names) - len(other)} of {len(workers)} workers have this model"
    if other:
        advice = f"{', '.join(other)} has other weights under this name. Give every machine the same --model."
        return Finding("checkpoints", Verdict.WARN, figure, advice, values)
    if without:
        figure += f", {without} would fetch layers"
    return Finding("checkpoints", Verdict.OK, figure, "", values)


def check_equal_chips(workers: Sequence[ReachedWorker]) -> Finding:
    """Report workers with different chips, which may round differently."""
    chips = sorted({worker.chip for worker in workers})
    if len(chips) < 2:
        return Finding("chips", Verdict.OK, chips[0] if chips else "no worker", "")
    advice = (
        "Chips of different generations round differently, so an answer may change when the plan changes. "
        "Answers stay valid."
    )
    return Finding("chips", Verdict.WARN, ", ".join(chips), advice, {"chips": chips})
