"""A short run of the chaos study; `python -m tests.cluster.chaos` makes long ones."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.chaos import run

FAULTS = 4


def test_no_fault_loses_or_changes_a_token(tmp_path: Path) -> None:
    """Workers killed, stopped and drained under load: every stream ends whole, with the undisturbed run's answer."""
    report = run(tmp_path, "builtin", FAULTS, seed=7)
    print(report)
    assert sum(report.faults.values()) == FAULTS
    assert report.finished > 0
    assert (report.failed, report.hung) == ([], 0), report
    assert (report.short, report.long, report.differing) == (0, 0, 0), report
