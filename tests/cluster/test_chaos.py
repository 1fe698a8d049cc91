"""A short run of the chaos study; `python -m tests.cluster.chaos` makes long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos import run

FAULTS = 3


@pytest.mark.chaos
def test_no_fault_loses_or_changes_a_token(tmp_path: Path) -> None:
    """Workers hurt at random under load: every stream ends whole, with the undisturbed run's answer."""
    report = run(tmp_path, "builtin", FAULTS, seed=7)
    print(report)
    assert sum(report.faults.values()) == FAULTS
    assert report.outcome.finished > 0
    assert report.outcome.wrong == []
    assert (report.outcome.lost, report.outcome.duplicated, report.outcome.hung) == (0, 0, 0)
    assert report.episodes
    assert report.not_back == []
