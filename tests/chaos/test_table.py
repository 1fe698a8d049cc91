"""Chaos runs choose their kinds of faults, compare every token, and add their figures in one table."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest

from tests.chaos import run as driver
from tests.chaos.crash import crashes_of
from tests.chaos.faults import (
    COORDINATOR,
    ENDING_KINDS,
    HOST_KINDS,
    KINDS,
    NETWORK_KINDS,
    SURVIVOR,
    schedule,
)
from tests.chaos.load import Answer, Outcome
from tests.chaos.pauses import Injected, silence_during
from tests.chaos.report import Report
from tests.chaos.run import chosen_kinds
from tests.chaos.served_by import pieces_by_workers, share_of_several
from tests.chaos.table import add_run

SECONDS = (2.0, 4.0)


def test_faults_of_networks_and_hosts_are_scheduled_by_the_seed() -> None:
    """Each kind comes equally often, faults that end a process spare one worker, and some hit the coordinator."""
    kinds = (*NETWORK_KINDS, *HOST_KINDS)
    found = schedule(3, 30 * len(kinds), 3, SECONDS, kinds)
    assert found == schedule(3, 30 * len(kinds), 3, SECONDS, kinds)
    assert Counter(fault.kind for fault in found) == dict.fromkeys(kinds, 30)
    assert all(f.victim != SURVIVOR for f in found if f.kind in ENDING_KINDS)
    assert {f.kind for f in found if f.victim == COORDINATOR} == {"clock", "disk", "descriptors"}
    assert {f.opener for f in found if f.kind == "oneway"} == {None, COORDINATOR, 0, 1, 2}
    assert all(0 <= fault.amount < 1 for fault in found)


def test_kinds_are_chosen_by_group_and_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown kinds and kinds that exclude each other are errors, and impossible ones are left out with a reason."""
    monkeypatch.setattr(driver, "why_impossible", {"disk": "no root"}.get)
    assert chosen_kinds("process") == [*KINDS]
    assert chosen_kinds("network,kill") == [*NETWORK_KINDS, "kill"]
    assert chosen_kinds("clock,disk") == ["clock"]
    assert chosen_kinds("disk") == []
    assert capsys.readouterr().out == 2 * "left out: disk: no root\n"
    for words, error in (
        ("kil", "unknown kind of fault: kil"),
        ("process,network", "cut and freeze need proxies"),
    ):
        with pytest.raises(ValueError, match=error):
            chosen_kinds(words)


def test_log_probabilities_and_cancelled_answers_are_compared() -> None:
    """One different bit of a log-probability is a different answer, also in the part that a client received."""
    wanted = Answer("abc", 3, [-0.5, -0.25, -1.0])
    outcome = Outcome()
    outcome.add(Answer("abc", 3, [-0.5, -0.25, -1.0]), wanted)
    outcome.add_cancelled(Answer("ab", 0, [-0.5]), wanted)
    assert (outcome.differing, outcome.tokens, outcome.logprobs, outcome.cancelled) == (0, 3, 4, 1)
    outcome.add(Answer("abc", 3, [-0.5, -0.25, -1.0000001]), wanted)
    outcome.add_cancelled(Answer("ac", 0, []), wanted)
    outcome.add_cancelled(Answer("a", 0, [-0.6]), wanted)
    assert (outcome.differing, len(outcome.wrong)) == (3, 3)


def test_the_silence_of_a_fault_overlaps_it() -> None:
    """Only silences during the fault and its repair count, and they count as a whole."""
    answers = [Answer(times=[1.0, 9.0, 12.0, 17.0]), Answer(times=[10.5, 11.5, 30.0])]
    assert silence_during(Injected("loss", 10.0, 11.0), answers) == 3.0
    assert silence_during(Injected("loss", 40.0, 41.0), answers) == 0.0


def test_runs_are_added_in_one_table(tmp_path: Path) -> None:
    """A table has every run, and the sums of its faults, answers, tokens and silences."""
    table = tmp_path / "table.json"
    for seed, silence in ((1, 2.5), (2, 7.5)):
        report = Report(seed, 60.0, Counter(loss=2, kill=1))
        report.outcome = Outcome(5, differing=1, wrong=["a", "b"], cancelled=2, tokens=100)
        report.pieces = Counter({0: 10, 2: 30})
        report.silences = {"loss": [0.5, silence], "kill": [1.0], "replan": [99.0]}
        text = add_run(table, report)
    found = json.loads(table.read_text())
    assert [run["seed"] for run in found["runs"]] == [1, 2]
    assert found["total"]["faults"] == 6
    assert found["total"]["answers"]["finished"] == 10
    assert found["total"]["answers"]["failed or cut"] == 2
    assert found["total"]["longest silence"] == 7.5
    assert "two workers or more: 75.0%" in text
    assert "| loss | 4 | 0 | 1.5, 7.5, 7.5 |" in text


def test_crashes_are_found_in_logs(tmp_path: Path) -> None:
    """A log with a traceback is named with the text after it."""
    (tmp_path / "good.log").write_text("well\n")
    (tmp_path / "bad.log").write_text("well\nTraceback (most recent call last):\n  boom\n")
    assert crashes_of(tmp_path) == ["bad.log: Traceback (most recent call last):\n  boom\n"]
    (tmp_path / "bad.log").write_text("Traceback " + "x" * 900 + " RuntimeError: full\nnext line\n")
    (found,) = crashes_of(tmp_path)
    assert found.startswith("bad.log: Traceback x")
    assert found.endswith("RuntimeError: full")


def test_pieces_are_counted_by_the_workers_of_their_plan() -> None:
    """A piece belongs to the plan that served last before it, and requests are no pieces."""
    records = [
        {"time": f"2026-01-01T00:00:{second:02}+00:00", "message": message, "workers": workers}
        for second, message, workers in (
            (10, "cluster: serving", 2),
            (20, "cluster: loading", 1),
            (22, "cluster: serving", 0),
        )
    ]
    start = datetime.fromisoformat("2026-01-01T00:00:00+00:00").timestamp()
    answers = [Answer(times=[start + at for at in (9.0, 11.0, 21.0, 23.0)])]
    assert pieces_by_workers(records, answers) == {2: 2, 0: 1}
    assert share_of_several({0: 1, 1: 1, 2: 4, 3: 2}) == 0.75
