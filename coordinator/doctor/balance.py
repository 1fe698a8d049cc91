"""The measured times of the stages of a running plan against the times that the plan expects."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.doctor.finding import Finding, Verdict

SLOW_STAGE = 1.4
"""Ratio of a stage's time to the expected one, relative to the best stage. The planner's model errs by less."""

UNEVEN = 1.5
"""Ratio of the slowest stage's time to the mean, above which the others wait noticeably."""


def check_balance(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the stages of `nodes`, which are those of `/status`.

    The plan expects the time in which a machine reads its weights. All stages are slower than that by some factor, and
    the smallest factor of a stage applies to all of them.
    """
    stages = [n for n in nodes if n.get("stage_ms") and n.get("weight_bytes")]
    known = [n for n in stages if n.get("bytes_per_second")]
    if len(known) < 2 or len(known) < len(stages):
        return Finding("balance", Verdict.SKIP, "needs a plan with two stages that has answered")
    reads = [1e3 * n["weight_bytes"] / n["bytes_per_second"] for n in known]
    factor = min(n["stage_ms"] / read for n, read in zip(known, reads, strict=True))
    expected = {str(n["name"]): factor * read for n, read in zip(known, reads, strict=True)}
    measured = {str(n["name"]): float(n["stage_ms"]) for n in known}
    uneven = max(measured.values()) / statistics.mean(measured.values())
    values = {"measured_ms": measured, "expected_ms": expected, "slowest_over_mean": uneven}
    figure = ", ".join(
        f"{name} {ms:.1f} ms ({expected[name]:.1f} expected)" for name, ms in measured.items()
    )
    slow = [name for name, ms in measured.items() if ms > SLOW_STAGE * expected[name]]
    advice = []
    if slow:
        advice.append(
            f"{', '.join(slow)} is slower than its memory bandwidth promises. Look for heat, the battery, and other "
            "programs there, then run mtp-coord replan."
        )
    if uneven > UNEVEN:
        advice.append(
            f"The slowest stage takes {uneven:.1f} times the mean, and the others wait for it. Pin fewer layers "
            "there, or raise --memory-limit on the others."
        )
    verdict = Verdict.WARN if advice else Verdict.OK
    return Finding("balance", verdict, figure, " ".join(advice), values)
