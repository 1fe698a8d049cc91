"""Checks of this machine: versions, memory, power and bandwidth."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx
import psutil

from coordinator.doctor.finding import CommandOutput, Finding, Verdict, command_output, judged
from proto.terminal.progress import format_size
from worker.engine import hardware

PACKAGES = ("mtp-cluster", "mlx", "mlx-lm")

WIRING_RELEASE = 15
"""Release of macOS from which MLX can wire weights."""


def check_versions() -> Finding:
    """Report the versions of the system and of the packages that decide the arithmetic."""
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.platform()
    values: dict[str, str] = {"system": system, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            values[package] = version(package)
        except PackageNotFoundError:
            values[package] = "not installed"
    figure = ", ".join(
        f"{name} {value}" if name != "system" else value for name, value in values.items()
    )
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


def check_memory(output: CommandOutput = command_output) -> Finding:
    """Report what a worker may use here, and what else uses the memory."""
    total, swap = psutil.virtual_memory().total, psutil.swap_memory().used
    limit = hardware.default_memory_limit()
    large = _large_processes(total)
    values = {
        "total": total,
        "available": psutil.virtual_memory().available,
        "limit": limit,
        "recommended": mx.device_info().get("max_recommended_working_set_size"),
        "wired_limit_mb": _wired_limit(output),
        "swap": swap,
        "large": large,
    }
    advice = []
    if swap > SWAP_SHARE * total:
        advice.append(
            f"{format_size(swap)} are swapped out. End other programs, or lower --memory-limit, "
            "because a model that is swapped answers very slowly."
        )
    if large:
        names = ", ".join(f"{name} {format_size(size)}" for name, size in large)
        advice.append(f"Other programs hold much memory: {names}.")
    figure = (
        f"{format_size(total)}, a worker may use {format_size(limit)}, swap {format_size(swap)}"
    )
    return judged("memory", figure, " ".join(advice), values)


def _wired_limit(output: CommandOutput) -> int | None:
    """Return `iogpu.wired_limit_mb` of macOS, where 0 stands for Apple's default."""
    if sys.platform != "darwin":
        return None
    found = re.search(r"\d+", output("sysctl", "-n", "iogpu.wired_limit_mb"))
    return int(found[0]) if found else None


def _large_processes(total: int) -> list[tuple[str, int]]:
    """Return names and resident bytes of the largest other processes."""
    found = []
    for process in psutil.process_iter(["name", "memory_info", "pid"]):
        info = process.info
        if info["memory_info"] and info["pid"] != psutil.Process().pid:
            found.append((info["name"] or "?", info["memory_info"].rss))
    large = [(name, size) for name, size in found if size > LARGE_SHARE * total]
    return sorted(large, key=lambda entry: -entry[1])[:5]


def check_power(output: CommandOutput = command_output) -> Finding:
    """Report what may put this Mac to sleep or slow it down while it serves."""
    if sys.platform != "darwin":
        return Finding("power", Verdict.SKIP, "only on macOS")
    source = _source(output("pmset", "-g", "batt"))
    settings = _settings(output("pmset", "-g", "custom")).get(source, {})
    values: dict[str, Any] = {"source": source, **settings}
    advice = []
    if source == "Battery Power":
        advice.append("Connect the power adapter, since macOS slows the GPU on battery.")
    if settings.get("lowpowermode") == 1:
        advice.append("Turn off Low Power Mode.")
    if settings.get("sleep", 0) > 0:
        advice.append(
            f"This Mac sleeps after {settings['sleep']} minutes. Both programs prevent that while they run, "
            "but a closed lid sleeps all the same."
        )
    serious = source == "Battery Power" or settings.get("lowpowermode") == 1
    verdict = Verdict.WARN if serious else Verdict.OK
    minutes = settings.get("sleep")
    figure = f"{source or 'unknown source'}, sleep {minutes if minutes else 'off'}"
    return Finding("power", verdict, figure, " ".join(advice), values)


def _source(batt: str) -> str:
    """Return `AC Power` or `Battery Power`, from the output of `pmset -g batt`."""
    found = re.search(r"drawing from '([^']+)'", batt)
    return found[1] if found else ""


def _settings(custom: str) -> dict[str, dict[str, int]]:
    """Return the numeric settings of each power source, from the output of `pmset -g custom`."""
    found: dict[str, dict[str, int]] = {}
    source = ""
    for line in custom.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            source = line.removesuffix(":")
            found[source] = {}
        elif match := re.match(r"\s+(\w+)\s+(\d+)", line):
            found.setdefault(source, {})[match[1]] = int(match[2])
    return found


GIGABYTES_PER_SECOND = {
    "M1": 68,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": 300,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": 410,
    "M5": 153,
    "NVIDIA H200": 4800,
}
"""Published figures in GB/s. Of a chip that exists in two variants it is the smaller one's."""

LEAST_SHARE = 0.6
"""Share of the published figure below which something slows the machine down. The probe rounds to 41 %."""


def known_bandwidth(chip: str) -> int | None:
    """Return the published GB/s of a chip's name, such as `Apple M4 Max`, or None for an unknown chip."""
    names = sorted(GIGABYTES_PER_SECOND, key=len, reverse=True)
    for name in names:
        if re.search(rf"\b{re.escape(name)}\b", chip):
            return GIGABYTES_PER_SECOND[name]
    return None


def check_bandwidth(chip: str, bytes_per_second: float) -> Finding:
    """Compare the speed of matrix-vector products, which decoding consists of, with the chip's figure."""
    measured, known = bytes_per_second / 1e9, known_bandwidth(chip)
    values = {"chip": chip, "measured": bytes_per_second, "published": known and known * 1e9}
    if known is None:
        figure = f"{chip}: {measured:.3g} GB/s in products of a matrix and a vector"
        return judged("bandwidth", figure, "", values)
    advice = (
        "Decoding will be slow, and the plan gives this machine fewer layers. End other programs that use the "
        "GPU, leave Low Power Mode, and let the machine cool down."
    )
    slow = measured < LEAST_SHARE * known
    figure = f"{chip}: {measured:.3g} of {known} GB/s"
    return judged("bandwidth", figure, advice if slow else "", values)


def measure_bandwidth() -> Finding:
    """Measure this machine, which takes a tenth of a second, and judge the figure."""
    return check_bandwidth(hardware.chip(), hardware.measured_bandwidth())


def own_version() -> str:
    """Return the versions of the programs here, as workers report theirs."""
    return hardware.own_version()
