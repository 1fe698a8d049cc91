"""The checks of `mtp-coord doctor`: this machine, its kernels, the network, and workers. Each returns one finding."""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import psutil

from coordinator.drafts.controller import MtpMode
from coordinator.pipeline.local_pipeline import LocalPipeline
from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy, connect_worker
from coordinator.schedule import request
from coordinator.schedule.local_generator import local_generator
from coordinator.schedule.loop import GenerationLoop
from coordinator.text.tokenizer import Tokenizer
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto import cluster_pb2 as pb
from proto.announcement import host_of
from proto.errors import ClusterError, VersionError
from proto.local_network import NO_ROUTE, NO_ROUTE_NUMBER, REFUSES, own_networks, refusal
from proto.rpc.status_codes import printable
from proto.terminal.progress import format_size
from worker.engine import hardware
from worker.engine.cost_report import Costs


class Verdict(StrEnum):
    """The result of a check in one word. A skipped check does not apply to this machine."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of a check: a verdict, its figure, an advice or nothing, and plain JSON values for a report."""

    check: str
    verdict: Verdict
    figure: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def judged(check: str, figure: str, advice: str, values: dict[str, Any]) -> Finding:
    """Return a finding that is a warning if there is advice."""
    return Finding(check, Verdict.WARN if advice else Verdict.OK, figure, advice, values)


SECONDS = 5.0
"""Seconds. Longest run of one program. All of them answer from memory."""


def command_output(*command: str) -> str:
    """Return what `command` prints, or an empty string if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


WIRING_RELEASE = 15
"""Release of macOS from which MLX can wire weights."""


def check_versions() -> Finding:
    """Report the versions of the system and of the packages that decide the arithmetic."""
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.platform()
    values: dict[str, str] = {"system": system, "python": platform.python_version()}
    values |= {package: version(package) for package in ("mtp-cluster", "mlx", "mlx-lm")}
    figure = ", ".join(f"{name} {value}" for name, value in values.items()).removeprefix("system ")
    release = platform.mac_ver()[0].partition(".")[0]
    if sys.platform == "darwin" and platform.machine() != "arm64":
        advice = "This Python runs under Rosetta, where MLX has no GPU. Install a Python for arm64."
        return Finding("versions", Verdict.FAIL, figure, advice, values)
    old = sys.platform == "darwin" and int(release) < WIRING_RELEASE
    advice = "macOS 15 or later keeps idle weights in memory. Update macOS."
    return judged("versions", figure, advice if old else "", values)


SAMPLES = 50

SLOW_SECONDS = 1e-3
"""Seconds. Reports give 0.2 to 0.25 ms for Metal."""

SWAP_SHARE = 0.05
"""Share of the machine's memory. More swap in use than this means that memory is short already."""


def check_device() -> Finding:
    """Report the device's bandwidth, its round trip with Python, its memory for a worker, and swap in use."""
    chip, speed = hardware.chip(), hardware.measured_bandwidth()
    one = mx.ones((8,))
    mx.eval(one)
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        mx.eval(one + 1)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    memory, swap = psutil.virtual_memory().total, psutil.swap_memory().used
    limit = hardware.default_memory_limit()
    advice = ["The device answers slowly. End other programs that use it."] * (seconds > SLOW_SECONDS)
    if swap > SWAP_SHARE * memory:
        advice.append("A swapped model answers very slowly. End other programs, or lower --memory-limit.")
    figure = (
        f"{chip}, {speed / 1e9:.3g} GB/s, a round trip takes {seconds * 1e3:.3f} ms; {format_size(memory)}, "
        f"a worker may use {format_size(limit)}, swap {format_size(swap)}"
    )
    values = {"chip": chip, "bytes_per_second": speed, "round_trip_seconds": seconds}
    values |= {"memory": memory, "limit": limit, "swap": swap}
    return judged("device", figure, " ".join(advice), values)


def check_costs(name: str, measure: Callable[[], Costs]) -> Finding:
    """Report the times of one part of a window. A kernel of this project that fails is a warning."""
    figure, values, problem = measure()
    mx.clear_cache()
    advice = "MLX computes it in its place. Please report it with the output of --json." if problem else ""
    return judged(name, f"{figure}; {problem}" if problem else figure, advice, values | {"problem": problem})


PROMPT = 'def median(values):\n    """Return the middle value of a sequence of numbers."""\n' * 8

DRAFTS = 2
"""Drafts of a window, so that the kernels for several rows run."""

WARM_UP_TOKENS, TOKENS = 32, 64
"""Tokens before the measurement, because CUDA compiles a kernel at the first use of each shape, and measured ones."""


async def check_kernels(checkpoint: Checkpoint) -> Finding:
    """Report the layers with their kernels, the speed of an answer, and whether drafts change its tokens."""
    layers, plain, speed = await _measure(checkpoint, 0)
    values: dict[str, Any] = {"layers": layers, "tokens_per_second": speed}
    figure = f"{layers}; {speed:.1f} tokens/s"
    if not checkpoint.mtp.complete:
        return judged("kernels", figure, "", values)
    _, drafted, speed = await _measure(checkpoint, DRAFTS)
    pairs = enumerate(zip(plain, drafted, strict=False))
    place = next((i for i, (one, other) in pairs if one != other), None)
    values |= {"first_difference": place, "drafted_tokens_per_second": speed}
    equal = "equal tokens" if place is None else f"other tokens from {place}"
    figure += f", {speed:.1f} with {DRAFTS} drafts and {equal}"
    advice = (
        "Rounding in windows changed the answer. Both are valid. Use --mtp off where the same request must always "
        "give the same answer."
    )
    return judged("kernels", figure, "" if place is None else advice, values)


async def _measure(checkpoint: Checkpoint, drafts: int) -> tuple[str, tuple[int, ...], float]:
    """Return the layers for people, the tokens of an answer with `drafts` a window, and its tokens a second."""
    async with local_generator(checkpoint, mtp=MtpMode(drafts), prefix_cache=False) as loop:
        prompt = Tokenizer.load(checkpoint.path, checkpoint.config.eos_token_ids).encode(PROMPT)
        await _generate(loop, prompt, WARM_UP_TOKENS)
        tokens, seconds = await _generate(loop, prompt, TOKENS)
        own = loop.pipeline
        speed = (len(tokens) - 1) / max(seconds, 1e-9)
        return own.layers if isinstance(own, LocalPipeline) else "", tokens, speed


async def _generate(loop: GenerationLoop, prompt: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], float]:
    found: list[int] = []
    async for event in request.generate(loop, request.GenerationRequest(prompt, tokens)):
        if isinstance(event, request.TokenChunk):
            found += event.tokens
        elif isinstance(event, request.Finished):
            return tuple(found), event.stats.decode_seconds
    raise AssertionError("the answer has no end")


def check_discovery(candidates: Sequence[Candidate], enabled: bool, problem: str, seconds: float) -> Finding:
    """Report the announced workers. `problem` is the error of the mDNS browser, empty for none."""
    found = [f"{c.name} at {c.addresses[0]}" for c in candidates if c.announcement is not None]
    if not enabled:
        return Finding("mDNS", Verdict.SKIP, "off by --no-mdns")
    advice = ""
    if problem:
        advice = "mDNS is unavailable here. Name each worker with --worker HOST:PORT."
    elif not candidates:
        advice = (
            "No worker was found. Start mtp-worker on each machine. If it runs, pass --worker HOST:PORT: the "
            "network or macOS's Local Network privacy may block multicast."
        )
    figure = problem or ", ".join(found) or f"no worker in {seconds:g} s"
    return judged("mDNS", figure, advice, {"found": found, "problem": problem})


def check_thunderbolt(workers: int, output: Callable[..., str] = command_output) -> Finding:
    """Report the active ports of the Thunderbolt Bridge and the active RDMA devices of this Mac."""
    if sys.platform != "darwin":
        return Finding("Thunderbolt", Verdict.SKIP, "only on macOS")
    bridge = re.findall(r"member: (\w+)", output("ifconfig", "bridge0"))
    ports = [m for m in bridge if "status: active" in output("ifconfig", m)]
    devices = re.findall(r"^\s*(rdma_\w+)\s", output("ibv_devices"), re.MULTILINE)
    active = [n for n in devices if "PORT_ACTIVE" in output("ibv_devinfo", "-d", n)]
    advice = []
    if len(ports) > 1 and workers > 1:
        advice.append(
            "The bridge has no loop protection: three Macs in a ring flood the network. Connect them in a chain, or "
            "remove the bridge and give each cable its own subnet (docs/macs.md)."
        )
    if len(active) > 1:
        advice.append("Use one cable for a pair, and name its device with mtp-worker --rdma.")
    if inside := [name for name in active if name.removeprefix("rdma_") in bridge]:
        advice.append(
            f"{', '.join(inside)} is in the Thunderbolt Bridge, where RDMA fails. Take the port out of the bridge."
        )
    rdma = ", ".join(active) or "none" if devices else "off (`rdma_ctl enable` in macOS Recovery)"
    figure = f"{len(ports)} of {len(bridge)} ports of the bridge in use, active RDMA devices: {rdma}"
    values = {"bridge": bridge, "ports": ports, "devices": devices, "active": active}
    return judged("Thunderbolt", figure, " ".join(advice), values)


MAX_VERSION = 100
"""Characters of the versions that a worker reports."""

DESCRIBE_SECONDS = 10.0
"""Seconds. Longest wait for one description."""


async def check_worker(
    candidate: Candidate, model: pb.ModelRef, me: pb.Coordinator, policy: ConnectionPolicy, own: str
) -> Finding:
    """Ask a candidate at its addresses, in order, until one answers. Compare its versions with `own`."""
    error = None
    for address in candidate.addresses:
        try:
            client, info = await connect_worker(policy, candidate, address, me, model, timeout=DESCRIBE_SECONDS)
        except ClusterError as problem:
            error = problem
            continue
        await client.close()
        return _described(info, address, model, own)
    return _unreachable(candidate, error)


def _described(info: pb.WorkerInfo, address: str, model: pb.ModelRef, own: str) -> Finding:
    chip, limit = info.hardware.chip, info.hardware.memory_limit
    versions = printable(info.version, MAX_VERSION) or "unknown"
    values = {"address": address, "chip": chip, "memory_limit": limit, "version": versions}
    values["bytes_per_second"] = info.hardware.bytes_per_second
    advice = []
    if info.model and info.fingerprint != model.fingerprint:
        advice.append(f"It has another checkpoint ({info.model}). Give both programs the same --model.")
    if versions != own:
        advice.append(
            f"It runs {versions}, and this machine {own}. Install the same release everywhere, with its pinned "
            "packages. Other versions of MLX round differently."
        )
    return judged(f"worker {info.name}", f"{address}, {chip}, {format_size(limit)}", " ".join(advice), values)


def _unreachable(candidate: Candidate, error: ClusterError | None) -> Finding:
    text = str(error)
    if isinstance(error, VersionError):
        advice = "Install the same release on every machine."
    elif "refused" in text:
        advice = "No worker listens there. Start mtp-worker with --listen on that address."
    elif NO_ROUTE in text:
        text, advice = text.partition(f". {REFUSES}")[0], _no_route_advice(host_of(candidate.addresses[-1]))
    else:
        advice = "Check the address, the cable and the firewall, and that mtp-worker runs there."
    return Finding(f"worker {candidate.name}", Verdict.FAIL, text, advice, {"error": text})


def _no_route_advice(host: str) -> str:
    """Return the advice for a host to which there is no route. On a Mac, ping has a permission of its own."""
    answers = sys.platform == "darwin" and bool(command_output("ping", "-c", "1", "-t", "2", host))
    refused = refusal(sys.platform, NO_ROUTE_NUMBER, host, own_networks(), answers)
    unreachable = "The host is unreachable. Check the address and the cable, and that the machine is on."
    return f"The host answers ping, but {refused}." if refused else unreachable
