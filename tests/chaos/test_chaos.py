"""A short run of the chaos study. `make nightly` makes long ones, with networks and machines that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import STUDIES
from tests.chaos.run import Plan, run

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

FAULTS, SEED = 4, 44
"""One killed, one paused, one cut off and one restarted worker."""


def test_no_fault_loses_or_changes_a_token(tmp_path: Path) -> None:
    """Every stream under random faults ends complete, with the answer of the undisturbed run."""
    report = run(Plan("process", FAULTS, SEED, STUDIES["process"]), tmp_path)
    print(report)
    assert report.faults.keys() == {"kill", "stop", "cut", "restart"}
    assert report.outcome.finished > 0
    assert (report.outcome.wrong, report.outcome.hung, report.not_back) == ([], 0, [])
    assert report.plans > FAULTS
    assert report.crashes == []
