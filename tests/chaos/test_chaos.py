"""A short run of the chaos study. `make nightly` makes long ones, with networks and machines that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run

pytestmark = pytest.mark.chaos

FAULTS, SEED = 4, 44
"""One killed, one paused, one cut off and one restarted worker."""


def test_no_fault_loses_or_changes_a_token(tmp_path: Path) -> None:
    """Every stream under random faults ends complete, with the answer of the undisturbed run."""
    report = run(tmp_path, "builtin", FAULTS, seed=SEED)
    print(report)
    assert sum(report.faults.values()) == FAULTS
    assert report.outcome.finished > 0
    assert report.outcome.wrong == []
    assert (report.outcome.lost, report.outcome.duplicated, report.outcome.hung) == (0, 0, 0)
    assert report.episodes
    assert report.not_back == []
    assert report.faults.keys() == {"kill", "stop", "cut", "restart"}
