"""Short runs of the chaos study. `python -m tests.chaos.run` makes long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import GROUPS, why_impossible
from tests.chaos.report import Report
from tests.chaos.run import FEW_WORKERS, run

pytestmark = pytest.mark.chaos

FAULTS, SEED = 4, 44
"""One killed, one paused, one cut off and one restarted worker."""


def check(report: Report, faults: int) -> None:
    print(report)
    assert sum(report.faults.values()) == faults
    assert report.outcome.finished > 0
    assert report.outcome.wrong == []
    assert (report.outcome.lost, report.outcome.duplicated, report.outcome.hung) == (0, 0, 0)
    assert report.episodes
    assert report.not_back == []


def test_no_fault_loses_or_changes_a_token(tmp_path: Path) -> None:
    """Every stream under random faults ends complete, with the answer of the undisturbed run."""
    report = run(tmp_path, "builtin", FAULTS, seed=SEED)
    check(report, FAULTS)
    assert report.faults.keys() == {"kill", "stop", "cut", "restart"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_faults(tmp_path: Path) -> None:
    """Over twenty faults the log explains every pause, and no process accumulates resources."""
    report = run(tmp_path, "builtin", 20, seed=1)
    check(report, 20)
    assert report.over == 0
    assert report.grew == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", ["network", "host"])
def test_networks_and_machines_fail(tmp_path: Path, group: str) -> None:
    """Every fault of packets and of machines leaves the answers as they are, and no process crashes."""
    kinds = [kind for kind in GROUPS[group] if why_impossible(kind) is None]
    if not kinds:
        pytest.skip("no fault of this group is possible here")
    report = run(tmp_path, "builtin", len(kinds), seed=2, workers=FEW_WORKERS, kinds=kinds)
    check(report, len(kinds))
    assert report.crashes == []
