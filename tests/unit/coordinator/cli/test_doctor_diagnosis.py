"""The run of all checks, and its report."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coordinator.cli import doctor_command
from coordinator.cli.doctor_checks import Finding, Verdict
from coordinator.cli.doctor_command import Diagnosis, json_report
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from proto.errors import CheckpointError


async def silent() -> Finding:
    """Represent a check that never ends."""
    await asyncio.sleep(60)
    raise AssertionError


async def broken() -> Finding:
    """Represent a check with a bug."""
    raise KeyError("interface")


async def refused() -> Finding:
    """Represent a check that raises an error of this project."""
    raise CheckpointError("the file is damaged")


async def test_a_check_that_fails_itself_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error and a deadline of a check become findings, and later checks run."""
    monkeypatch.setattr(doctor_command, "CHECK_SECONDS", 0.1)
    shown: list[Finding] = []
    run = Diagnosis(Checkpoint.open(checkpoint_dir()), shown.append)
    for name, check in (("silent", silent), ("broken", broken), ("refused", refused)):
        await run.check(name, check)
    await run.check("fine", lambda: Finding("fine", Verdict.OK, "1"))
    figures = [(f.check, f.verdict) for f in run.findings]
    assert figures == [
        ("silent", Verdict.FAIL),
        ("broken", Verdict.FAIL),
        ("refused", Verdict.FAIL),
        ("fine", Verdict.OK),
    ]
    assert "0.1 s" in shown[0].figure
    assert "interface" in shown[1].figure
    assert shown[2].figure == "the file is damaged"


def test_the_report_has_no_path_of_the_user() -> None:
    """In the JSON report the home directory is `~`, at any depth."""
    home = str(Path.home())
    values = {"a": [f"{home}/x"], home: {"b": (f"see {home}",)}}
    finding = Finding("c", Verdict.WARN, f"{home}/models", f"Free {home}.", values)
    text = json.dumps(json_report([finding]))
    assert home not in text or home == "/"
    assert "~/models" in text
    assert json.loads(text)["checks"][0]["verdict"] == "warn"
