"""Memory limits, swap, and other programs that hold much memory."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import psutil

from coordinator.doctor.command_output import CommandOutput, command_output
from coordinator.doctor.finding import Finding, Verdict
from proto.terminal.size import format_size

SWAP_SHARE = 0.05
"""Share of the machine's memory. More swap in use than this means that memory is short already."""

LARGE_SHARE = 0.1
"""Share of the machine's memory from which another program is named."""


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes: the default limit of a worker here, and Metal's recommendation, None without Metal."""

    default: int
    recommended: int | None


def check_memory(limits: MemoryLimits, output: CommandOutput = command_output) -> Finding:
    """Report what a worker may use here, and what else uses the memory."""
    total, swap = psutil.virtual_memory().total, psutil.swap_memory().used
    large = _large_processes(total)
    values = {
        "total": total,
        "available": psutil.virtual_memory().available,
        "limit": limits.default,
        "recommended": limits.recommended,
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
    figure = f"{format_size(total)}, a worker may use {format_size(limits.default)}, swap {format_size(swap)}"
    return Finding(
        "memory", Verdict.WARN if advice else Verdict.OK, figure, " ".join(advice), values
    )


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
