"""The doctor's step: kernels counted in a lazy graph, and a step of the built-in model beside mlx-lm's."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.doctor_command import Diagnosis
from coordinator.doctor import checks
from coordinator.doctor.checks import Finding, Verdict, check_step, kernels_of, own_steps
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.layers.layer import KernelTrial
from worker.model.layer_variants import read_trials, write_trials


def test_views_are_no_kernels() -> None:
    """Joining three arrays is one kernel, and a reshape is none."""
    x = mx.ones((4, 4))
    mx.eval(x)
    y = (x @ x).reshape(2, 8).T
    found = kernels_of([mx.concatenate([y, y, y])])
    assert found["Concatenate"] == 1
    assert not {"Reshape", "Transpose"} & set(found)


def test_a_step_is_measured_beside_mlx_lms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the kernels, the times of both, and what the layers are."""
    monkeypatch.setattr(checks, "STEPS", 3)
    finding = check_step(Checkpoint.open(checkpoint_dir()))
    own, stock = finding.values["this project"], finding.values["mlx-lm"]
    assert finding.verdict in (Verdict.OK, Verdict.WARN)
    assert 0 < own["kernels"] < stock["kernels"], "the layers of this project join operations"
    for one in (own, stock):
        assert 0 < one["build"] < one["whole"]
    assert finding.values["layers"]


def test_a_lazy_step_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting needs the whole graph, which a stage usually starts to compute while it builds."""
    started: list[object] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: started.append(arrays))
    own_steps(Checkpoint.open(checkpoint_dir()))[0]()
    assert not started


def test_doctor_forgets_the_trials_of_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With --retry, a kernel that failed or lost is tried again. Without it the trials stay."""
    monkeypatch.setenv("MTP_STATE_DIR", str(tmp_path))

    async def find_nothing(_: Diagnosis) -> list[Finding]:
        """Skip all checks."""
        return []

    monkeypatch.setattr(Diagnosis, "run", find_nothing)
    write_trials({"window": KernelTrial(problem="it does not compile")})
    for flags, kept in (([], 1), (["--retry"], 0)):
        result = CliRunner().invoke(app, ["doctor", *flags], catch_exceptions=False)
        assert result.exit_code == 0
        assert len(read_trials()) == kept
