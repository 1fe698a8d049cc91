"""The number of open files that this process may have."""

from __future__ import annotations

import resource

from coordinator.doctor.finding import Finding, Verdict

ENOUGH = 2048
"""Open files. A streaming client needs one, and each worker a few."""


def check_open_files() -> Finding:
    """Report the soft limit in force, which both programs raise at their start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    few = not unlimited and soft < ENOUGH
    advice = f"Raise the hard limit to {ENOUGH} or more, as with ulimit -Hn." if few else ""
    figure = "no limit" if unlimited else f"limit {soft}"
    return Finding(
        "open files",
        Verdict.WARN if few else Verdict.OK,
        figure,
        advice,
        {"soft": soft, "hard": hard},
    )
