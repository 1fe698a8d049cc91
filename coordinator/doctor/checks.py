"""Checks of this machine, of its kernels and of a step beside mlx-lm's, of the network and of the workers."""

from __future__ import annotations

import itertools
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from coordinator.pipeline.worker_connection import Candidate, ConnectionPolicy, connect_worker
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KVFormat
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, VersionError
from proto.frame import Admit, Segment
from proto.rpc.status_codes import printable
from proto.span import Span
from proto.terminal.progress import format_size
from worker.engine import hardware
from worker.engine.hardware import release_weights
from worker.model.layer_variants import write_trials
from worker.model.loader import load_stage
from worker.model.stage import Stage


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

CommandOutput = Callable[..., str]
"""A function as `command_output`. Tests pass one that returns recorded outputs."""


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
    verdict, advice = Verdict.OK, ""
    release = platform.mac_ver()[0].partition(".")[0]
    if sys.platform == "darwin" and platform.machine() != "arm64":
        verdict = Verdict.FAIL
        advice = "This Python runs under Rosetta, where MLX has no GPU. Install a Python for arm64."
    elif sys.platform == "darwin" and release.isdigit() and int(release) < WIRING_RELEASE:
        verdict = Verdict.WARN
        advice = "macOS 15 or later keeps idle weights in memory. Update macOS."
    return Finding("versions", verdict, figure, advice, values)


SWAP_SHARE = 0.05
"""Share of the machine's memory. More swap in use than this means that memory is short already."""

LARGE_SHARE = 0.1
"""Share of the machine's memory from which another program is named."""


def check_memory() -> Finding:
    """Report what a worker may use here, and what else uses the memory."""
    total, swap = psutil.virtual_memory().total, psutil.swap_memory().used
    limit, me = hardware.default_memory_limit(), psutil.Process().pid
    found = [process.info for process in psutil.process_iter(["name", "memory_info", "pid"])]
    others = [i for i in found if i["memory_info"] and i["pid"] != me]
    sizes = [(i["name"] or "?", i["memory_info"].rss) for i in others]
    large = [entry for entry in sizes if entry[1] > LARGE_SHARE * total]
    large = sorted(large, key=lambda entry: -entry[1])[:5]
    values: dict[str, Any] = {"total": total, "limit": limit, "swap": swap, "large": large}
    values["available"] = psutil.virtual_memory().available
    values["recommended"] = mx.device_info().get("max_recommended_working_set_size")
    advice = []
    if swap > SWAP_SHARE * total:
        advice.append(
            f"{format_size(swap)} are swapped out. End other programs, or lower --memory-limit, "
            "because a model that is swapped answers very slowly."
        )
    if large:
        names = ", ".join(f"{name} {format_size(size)}" for name, size in large)
        advice.append(f"Other programs hold much memory: {names}.")
    size, usable, swapped = map(format_size, (total, limit, swap))
    figure = f"{size}, a worker may use {usable}, swap {swapped}"
    return judged("memory", figure, " ".join(advice), values)


def check_power(output: CommandOutput = command_output) -> Finding:
    """Report what may put this Mac to sleep or slow it down while it serves."""
    if sys.platform != "darwin":
        return Finding("power", Verdict.SKIP, "only on macOS")
    drawn = re.search(r"drawing from '([^']+)'", output("pmset", "-g", "batt"))
    source = drawn[1] if drawn else "unknown source"
    custom = output("pmset", "-g", "custom")
    section = re.search(rf"^{source}:\n((?: .*\n?)*)", custom, re.MULTILINE)
    found = re.findall(r"^ +(\w+) +(\d+)", section[1] if section else "", re.MULTILINE)
    settings = {name: int(value) for name, value in found}
    minutes = settings.get("sleep", 0)
    advice = []
    if source == "Battery Power":
        advice.append("Connect the power adapter, since macOS slows the GPU on battery.")
    if settings.get("lowpowermode") == 1:
        advice.append("Turn off Low Power Mode.")
    verdict = Verdict.WARN if advice else Verdict.OK
    if minutes:
        advice.append(
            f"This Mac sleeps after {minutes} minutes. Both programs prevent that while they run, "
            "but a closed lid sleeps all the same."
        )
    figure = f"{source}, sleep {minutes or 'off'}"
    return Finding("power", verdict, figure, " ".join(advice), {"source": source, **settings})


GIGABYTES_PER_SECOND = {
    "M1": {"": 68, "Pro": 200, "Max": 400, "Ultra": 800},
    "M2": {"": 100, "Pro": 200, "Max": 400, "Ultra": 800},
    "M3": {"": 100, "Pro": 150, "Max": 300, "Ultra": 819},
    "M4": {"": 120, "Pro": 273, "Max": 410},
    "M5": {"": 153},
    "H200": {"": 4800},
}
"""Published figures in GB/s, by chip and variant. Of a variant with two figures it is the smaller one."""

LEAST_SHARE = 0.6
"""Share of the published figure below which something slows the machine down. The probe rounds to 41 %."""


def check_bandwidth(chip: str, bytes_per_second: float) -> Finding:
    """Compare the speed of matrix-vector products, which decoding consists of, with the chip's figure."""
    measured = bytes_per_second / 1e9
    found = re.search(r"\b(M\d|H200)\b(?: (Pro|Max|Ultra))?", chip)
    published = GIGABYTES_PER_SECOND.get(found[1], {}).get(found[2] or "") if found else None
    values = {"chip": chip, "measured": bytes_per_second, "published": published}
    if published is None:
        figure = f"{chip}: {measured:.3g} GB/s in products of a matrix and a vector"
        return judged("bandwidth", figure, "", values)
    advice = (
        "Decoding will be slow, and the plan gives this machine fewer layers. End other programs that use the "
        "GPU, leave Low Power Mode, and let the machine cool down."
    )
    slow = measured < LEAST_SHARE * published
    figure = f"{chip}: {measured:.3g} of {published} GB/s"
    return judged("bandwidth", figure, advice if slow else "", values)


SAMPLES = 50

SLOW_SECONDS = 1e-3
"""Seconds. Reports give 0.2 to 0.25 ms for Metal."""


def check_evaluation() -> Finding:
    """Measure the round trip between Python and MLX's device with the smallest computation."""
    one = mx.ones((8,))
    mx.eval(one)
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        mx.eval(one + 1)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    slow = seconds > SLOW_SECONDS
    advice = "The device answers slowly. End other programs that use it." if slow else ""
    return judged("evaluation", f"{seconds * 1e3:.3f} ms", advice, {"seconds": seconds})


def check_discovery(
    candidates: Sequence[Candidate], enabled: bool, problem: str, seconds: float
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
        "remove the bridge and give each cable its own subnet (docs/macs.md)."
    )
    ring = len(active) > 1 and workers > 1
    return judged("Thunderbolt Bridge", figure, advice if ring else "", values)


RDMA_RELEASE = (26, 2)
"""Release of macOS with RDMA over Thunderbolt 5."""


def check_rdma(output: CommandOutput = command_output) -> Finding:
    """Report the RDMA devices of this Mac's Thunderbolt 5 ports and which of them are connected."""
    release = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2] if part.isdigit())
    if sys.platform != "darwin" or release < RDMA_RELEASE:
        return Finding("RDMA", Verdict.SKIP, "only on macOS 26.2 and later")
    names = re.findall(r"^\s*(rdma_\w+)\s", output("ibv_devices"), re.MULTILINE)
    if not names:
        figure = "off. `rdma_ctl enable` in macOS Recovery turns it on for Thunderbolt 5"
        return Finding("RDMA", Verdict.SKIP, figure)
    active = [n for n in names if "PORT_ACTIVE" in output("ibv_devinfo", "-d", n)]
    values = {"devices": names, "active": active}
    if not active:
        return Finding("RDMA", Verdict.SKIP, "no cable to another Mac with RDMA", "", values)
    advice = []
    if len(active) > 1:
        advice.append("Use one cable for a pair, and name its device with mtp-worker --rdma.")
    bridged = re.findall(r"member: (\w+)", output("ifconfig", "bridge0"))
    if inside := [name for name in active if name.removeprefix("rdma_") in bridged]:
        advice.append(
            f"{', '.join(inside)} is in the Thunderbolt Bridge, where RDMA fails. Take the port out of the bridge."
        )
    figure = f"{', '.join(active)} active of {len(names)}"
    return judged("RDMA", figure, " ".join(advice), values)


MAX_VERSION = 100
"""Characters of the versions that a worker reports."""

DESCRIBE_SECONDS = 10.0
"""Seconds. Longest wait for one description."""


async def check_worker(
    candidate: Candidate,
    model: pb.ModelRef,
    me: pb.Coordinator,
    policy: ConnectionPolicy,
    versions: dict[str, str],
) -> Finding:
    """Ask a candidate at its addresses, in order, until one answers. Put its versions by its name in `versions`."""
    error = None
    for address in candidate.addresses:
        try:
            client, info = await connect_worker(
                policy, candidate, address, me, model, timeout=DESCRIBE_SECONDS
            )
        except ClusterError as problem:
            error = problem
            continue
        await client.close()
        versions[info.name] = printable(info.version, MAX_VERSION)
        return _described(info, address, model)
    return _unreachable(candidate, error)


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
    other = info.model and info.fingerprint != model.fingerprint
    advice = f"It has another checkpoint ({info.model}). Give both programs the same --model."
    return judged(f"worker {info.name}", figure, advice if other else "", values)


def _unreachable(candidate: Candidate, error: ClusterError | None) -> Finding:
    text = str(error)
    if isinstance(error, VersionError):
        advice = "Install the same release on every machine."
    elif "refused" in text:
        advice = "No worker listens there. Start mtp-worker with --listen on that address."
    elif "LaunchDaemon" in text:
        advice = "macOS blocks the connection. See docs/macs.md."
    else:
        advice = "Check the address, the cable and the firewall, and that mtp-worker runs there."
    return Finding(f"worker {candidate.name}", Verdict.FAIL, text, advice, {"error": text})


def check_equal_versions(own: str, workers: Mapping[str, str]) -> Finding:
    """Compare the versions of the programs of each worker, which decide the arithmetic, with `own`."""
    other = {name: version or "unknown" for name, version in workers.items() if version != own}
    values = {"own": own, "others": other}
    if not other:
        return judged("versions of the workers", f"{own}, here and in all workers", "", values)
    figure = "; ".join([f"{own} here", *(f"{name}: {found}" for name, found in other.items())])
    advice = "Install the same release everywhere, with its pinned packages. Other versions of MLX round differently."
    return judged("versions of the workers", figure, advice, values)


VIEWS = set(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten NumberOfElements Reshape Slice Split Squeeze StopGradient "
    "Transpose Unflatten View".split()
)
"""MLX's operations that launch nothing where their input lies row by row in memory."""

STEPS = 30
"""Measured steps. Their medians count."""

WARM_STEPS = 4


def kernels_of(arrays: Sequence[mx.array]) -> Counter[str]:
    """Return the kernels that compute lazy `arrays`, by operation. Fused operations and compiled functions are one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *arrays)
        text = path.read_text()
    names = re.findall(r'\{ \d+ \[label ="([^"]*)", shape=rectangle\]', text)
    return Counter(name for name in names if name not in VIEWS)


BuildStep = Callable[[], list[mx.array]]
"""A function that returns the lazy arrays of the next plain step of one sequence: hidden vectors and states."""


def stock_steps(checkpoint: Checkpoint) -> BuildStep:
    """Return steps of mlx-lm's own model."""
    loaded: Any = load_model(checkpoint.path)[0]
    cache: Any = make_prompt_cache(loaded)

    def build() -> list[mx.array]:
        x = loaded.language_model.model(mx.ones((1, 1), mx.uint32), cache=cache)
        arrays = (array for held in cache for array in held.state)
        return [x, *(array for array in arrays if isinstance(array, mx.array))]

    return build


def own_steps(checkpoint: Checkpoint) -> tuple[BuildStep, str]:
    """Return steps of a stage with all layers, and the variants of its layers with the trials of their kernels."""
    span = Span(0, checkpoint.config.num_layers)
    modules = load_stage(checkpoint, span, first=True, last=True, dtype=None, with_head=False)
    stage = Stage(modules, KVFormat())
    sequence = stage.new_sequence(Admit(0, 2 * (WARM_STEPS + STEPS), 1))
    numbers = itertools.count()

    def build() -> list[mx.array]:
        number = next(numbers)
        run = (sequence, Segment(0, number, number, (1,)))
        tokens = mx.ones((1,), mx.uint32)
        if stage.token_layers:
            stage.announce_tokens(tokens, [run])
        x = stage.forward(stage.embed(tokens), [run], lazily=True)
        return [x, *sequence.arrays()]

    return build, stage.variants.summary


@dataclass(frozen=True)
class StepFigures:
    """Kernels of a step, seconds in which Python builds it, and seconds until it is computed."""

    kernels: int
    build: float
    whole: float


def measure_steps(build: BuildStep) -> StepFigures:
    """Return the medians of STEPS steps."""
    built, whole, kernels = list[float](), list[float](), 0
    for number in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        arrays = build()
        moment = time.perf_counter()
        if number == WARM_STEPS - 1:
            kernels = kernels_of(arrays).total()
        mx.eval(arrays)
        if number >= WARM_STEPS:
            built.append(moment - started)
            whole.append(time.perf_counter() - started)
    return StepFigures(kernels, statistics.median(built), statistics.median(whole))


def forget_trials() -> None:
    """Forget the trials of kernels on this machine, so that the next stage tries all kernels."""
    write_trials({})


def check_step(checkpoint: Checkpoint) -> Finding:
    """Measure a plain step of this project and of mlx-lm."""
    stock = measure_steps(stock_steps(checkpoint))
    release_weights()
    build, layers = own_steps(checkpoint)
    own = measure_steps(build)
    del build
    release_weights()
    figure = (
        f"{own.kernels} kernels ({stock.kernels} in mlx-lm), built in {own.build * 1e3:.2f} ms "
        f"({stock.build * 1e3:.2f}), computed in {own.whole * 1e3:.2f} ms ({stock.whole * 1e3:.2f}). Layers: {layers}"
    )
    slower = own.whole > 1.1 * stock.whole
    advice = "mlx-lm's step is faster. Please report it with --full --json, and try --kernels mlx."
    values = {"this project": asdict(own), "mlx-lm": asdict(stock), "layers": layers}
    return judged("step", figure, advice if slower else "", values)
