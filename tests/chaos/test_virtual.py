"""The study in virtual time: its plans lose, double and change no token, and one seed gives one run."""

from __future__ import annotations

import pytest

from tests.chaos.virtual import FAULTS, study_virtually

pytestmark = pytest.mark.smoke


def test_no_fault_of_plans_and_coordinators_changes_an_answer() -> None:
    """Answers under faults of every kind, and over several coordinators, equal the undisturbed ones."""
    result = study_virtually(120, seed=3)
    assert result.wrong == []
    assert result.faults.keys() == {*FAULTS, "coordinator"}
    assert result.counts["finished"] >= 10
    assert result.counts["lost"] == result.counts["doubled"] == result.counts["different"] == 0
    assert result.counts["backups written"] > 20
    again = study_virtually(120, seed=3)
    assert (again.faults, again.counts) == (result.faults, result.counts)
