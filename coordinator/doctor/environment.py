"""Versions, and the environment variables and priority that change how MLX computes."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from coordinator.doctor.finding import Finding, Verdict

PACKAGES = ("mtp-cluster", "mlx", "mlx-lm")

WIRING_RELEASE = 15
"""Release of macOS from which MLX can wire weights."""

PRIO_DARWIN_PROCESS = 4
"""The `which` of getpriority(2) on macOS that returns 1 for a process in the background class."""

HARMFUL = {
    "MLX_METAL_FAST_SYNCH": "It can block the GPU. Unset it.",
    "MLX_METAL_GPU_ARCH": "It makes MLX choose kernels of another chip. Unset it.",
    "MTP_DEVICE": "It makes this project compute on the CPU. Unset it, unless you run its tests.",
}

OWN = ("MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS",)
"""Variables that this project sets itself."""


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


def check_environment(environ: Mapping[str, str]) -> Finding:
    """Report variables of MLX, which another tool may have set."""
    found = {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith("MLX_") or name == "MTP_DEVICE") and name not in OWN
    }
    figure = ", ".join(f"{name}={value}" for name, value in found.items()) or "no MLX variables"
    harmful = [f"{name}: {HARMFUL[name]}" for name in found if name in HARMFUL]
    verdict = Verdict.WARN if harmful else Verdict.OK
    return Finding("environment", verdict, figure, " ".join(harmful), {"variables": found})


def check_priority() -> Finding:
    """Report a lowered priority, and macOS's background class, which give a process little time."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    background = sys.platform == "darwin" and os.getpriority(PRIO_DARWIN_PROCESS, 0) == 1
    figure = f"nice {niceness}" + (", background" if background else "")
    values = {"nice": niceness, "background": background}
    if niceness > 0 or background:
        advice = "Start the programs without nice, and with ProcessType Interactive under launchd."
        return Finding("priority", Verdict.WARN, figure, advice, values)
    return Finding("priority", Verdict.OK, figure, "", values)
