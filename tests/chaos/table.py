"""The added results of several chaos runs, in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.pauses import REPLAN, spread
from tests.chaos.served_by import share_of_several

if TYPE_CHECKING:
    from tests.chaos.report import Report

GROUPS = ("answers", "tokens", "pieces by workers")
"""The counts of a run that are added by name."""


def run_row(report: Report) -> dict[str, Any]:
    """Return the figures of one run."""
    outcome = report.outcome
    ended = [episode.kind for episode in report.episodes]
    kinds = {
        kind: {
            "faults": count,
            "ended a plan": ended.count(kind),
            "silences": [round(value, 2) for value in report.silences.get(kind, [])],
        }
        for kind, count in sorted(report.faults.items())
    }
    return {
        "seed": report.seed,
        "minutes": round(report.seconds / 60, 1),
        "netem": report.netem,
        "kinds": kinds,
        "answers": {
            "finished": outcome.finished,
            "different": outcome.differing,
            "failed or cut": len(outcome.wrong) - outcome.differing,
            "hung": outcome.hung,
            "cancelled": outcome.cancelled,
        },
        "tokens": {
            "compared": outcome.tokens,
            "lost": outcome.lost,
            "duplicated": outcome.duplicated,
            "log-probabilities": outcome.logprobs,
        },
        "pieces by workers": {str(w): n for w, n in sorted(report.pieces.items())},
        "longest silence": round(
            max((max(v) for k, v in report.silences.items() if k != REPLAN and v), default=0.0), 2
        ),
        "not back": report.not_back,
        "crashes": report.crashes,
        "wrong": outcome.wrong[:5],
    }


def add_run(file: Path, report: Report) -> str:
    """Append the figures of a run to a table, and return the table of all its runs as text."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    runs.append(run_row(report))
    total = sum_runs(runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"total": total, "runs": runs}, indent=1) + "\n")
    new.replace(file)
    return as_text(total, len(runs))


def sum_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all runs."""
    total: dict[str, Any] = {"faults": 0, "minutes": 0.0, "longest silence": 0.0}
    total |= {"kinds": {}, "not back": 0, "crashes": 0, **{group: {} for group in GROUPS}}
    for run in runs:
        for kind, row in run["kinds"].items():
            into = total["kinds"].setdefault(kind, {"faults": 0, "ended a plan": 0, "silences": []})
            for name, value in row.items():
                into[name] += value
            total["faults"] += row["faults"]
        for group in GROUPS:
            for name, value in run.get(group, {}).items():
                total[group][name] = total[group].get(name, 0) + value
        total["minutes"] = round(total["minutes"] + run["minutes"], 1)
        total["longest silence"] = max(total["longest silence"], run["longest silence"])
        total["not back"] += len(run["not back"])
        total["crashes"] += len(run["crashes"])
    return total


def as_text(total: Mapping[str, Any], runs: int) -> str:
    """Return the sums as a table for a page: the rows of the kinds, and one line for each group."""
    lines = ["| fault | times | ended a plan | silence of a client, s: median, 95 %, most |"]
    lines.append("| --- | --- | --- | --- |")
    for kind, row in total["kinds"].items():
        values = ", ".join(f"{value:.1f}" for value in spread(row["silences"]))
        lines.append(f"| {kind} | {row['faults']} | {row['ended a plan']} | {values} |")
    lines.append(f"{total['faults']} faults in {runs} runs of {total['minutes']} minutes together")
    for group in ("answers", "tokens"):
        figures = ", ".join(f"{value} {name}" for name, value in total[group].items())
        lines.append(f"{group}: {figures}")
    pieces = {int(workers): n for workers, n in total["pieces by workers"].items()}
    lines.append(f"pieces from plans of two workers or more: {share_of_several(pieces):.1%}")
    lines.append(f"longest silence {total['longest silence']:.1f} s")
    lines.append(f"workers not back in time {total['not back']}, crashes {total['crashes']}")
    return "\n".join(lines)
