"""The answers with and without drafts in the doctor's report."""

from __future__ import annotations

import pytest

from coordinator.cli import doctor_checks as checks
from coordinator.cli.doctor_checks import Verdict
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint

PLAIN = tuple(range(101))


@pytest.mark.parametrize(
    ("tokens", "place", "advice"), [(PLAIN, None, ""), ((*PLAIN[:40], 7, *PLAIN[41:]), 40, "--mtp off")]
)
async def test_drafts_that_change_an_answer_are_named(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], place: int | None, advice: str
) -> None:
    """An answer that drafts change is a warning with the place."""

    async def measure(_: Checkpoint, drafts: int) -> tuple[str, tuple[int, ...], float]:
        return "8 layers", tokens if drafts else PLAIN, 10.0

    monkeypatch.setattr(checks, "_measure", measure)
    finding = await checks.check_kernels(Checkpoint.open(checkpoint_dir()))
    assert finding.values["first_difference"] == place
    assert finding.verdict is (Verdict.WARN if advice else Verdict.OK)
    assert advice in finding.advice


@pytest.mark.slow
async def test_the_kernels_are_measured() -> None:
    """The built-in model gives its speeds, equal tokens, and the names of its layers."""
    values = (await checks.check_kernels(Checkpoint.open(checkpoint_dir()))).values
    assert values["first_difference"] is None
    assert values["tokens_per_second"] > 0
    assert values["drafted_tokens_per_second"] > 0
    assert values["layers"].startswith("8 ")
