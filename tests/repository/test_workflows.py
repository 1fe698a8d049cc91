"""The workflows of GitHub and the templates of its issues."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.skipif(which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_accepts_the_workflows() -> None:
    """actionlint finds nothing in the workflows, among them old actions and wrong expressions."""
    command = ["actionlint", "-shellcheck=", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_exists(path: Path) -> None:
    """Every job has a deadline, and every target of make and every test that it runs exists."""
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    assert all(job["timeout-minutes"] for job in content["jobs"].values())
    commands = "\n".join(s.get("run", "") for j in content["jobs"].values() for s in j["steps"])
    targets = re.findall(r"^make (\S+)$", commands, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{t.replace('.venv', '.*')}:", makefile, re.MULTILINE) for t in targets)
    assert all((ROOT / file).exists() for file in re.findall(r"tests/\S+\.py", commands))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_asks_for_the_report_of_doctor(path: Path) -> None:
    """Both forms require doctor's report of the machine."""
    fields = yaml.safe_load(path.read_text()).get("body", [])
    required = [f["attributes"]["label"] for f in fields if f.get("validations", {}).get("required")]
    assert path.name == "config.yml" or any("doctor" in label for label in required)


def test_the_run_on_a_mac_keeps_the_full_report() -> None:
    """The job on Apple's machine writes the full report as JSON into the folder that it uploads, whatever fails."""
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["macos"]["steps"]
    written = [re.search(r"doctor (.*) \| tee (\S+)/\S+\.json$", s.get("run", ""), re.MULTILINE) for s in steps]
    [report] = filter(None, written)
    assert {"--full", "--json"} <= set(report[1].split())
    uploads = [step for step in steps if "upload-artifact" in step.get("uses", "")]
    assert [(step["with"]["path"], step["if"]) for step in uploads] == [(report[2], "always()")]
