"""The answers with and without drafts in the doctor's report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.doctor import answer
from coordinator.doctor.checks import Verdict
from coordinator.schedule.request import GenerationStats
from mtp.builtin import checkpoint_dir
from mtp.checkpoint.format.checkpoint import Checkpoint

PLAIN = answer.Answer(0, tuple(range(101)), GenerationStats(50, 101, 0, 100, (), (), 0.5, 10.0))


def drafted(seconds: float, windows: int, tokens: tuple[int, ...] = PLAIN.tokens) -> answer.Answer:
    """Return an answer with 2 drafts a window."""
    counts = ((windows, windows), (windows // 2, windows // 4))
    return answer.Answer(2, tokens, GenerationStats(50, 101, 0, windows, *counts, 0.5, seconds))


@pytest.mark.parametrize(
    ("tokens", "place"), [(PLAIN.tokens, None), ((*PLAIN.tokens[:40], 7, *PLAIN.tokens[41:]), 40)]
)
def test_the_first_token_that_differs_is_named(tokens: tuple[int, ...], place: int | None) -> None:
    """An answer that drafts change is a warning with the position of the first other token."""
    finding = answer.judge_identity(PLAIN, drafted(5.0, 50, tokens))
    assert finding.values["first_difference"] == place
    assert finding.verdict is (Verdict.OK if place is None else Verdict.WARN)


@pytest.mark.parametrize(("seconds", "verdict"), [(6.0, Verdict.OK), (14.0, Verdict.WARN)])
def test_drafts_that_do_not_pay_are_named(seconds: float, verdict: Verdict) -> None:
    """Windows that cost more steps than they give tokens are a warning."""
    finding = answer.judge_speed(PLAIN, drafted(seconds, 50))
    assert finding.verdict is verdict
    assert finding.values["tokens_per_window"] == 2.0
    assert finding.values["window_cost"] == pytest.approx(seconds / 50 / 0.1)
    assert finding.values["prefill_tokens_per_second"] == 100.0
    assert finding.values["first_acceptance"] == 0.5
    pays_from = finding.values["break_even_acceptance"]
    assert 1 + pays_from + pays_from**2 == pytest.approx(max(seconds / 50 / 0.1, 1.0), abs=1e-6)


def test_the_price_of_exact_mode_is_named() -> None:
    """The report has the cost of --exact, and answers that still differ with it are a failure."""
    slower = answer.Answer(0, PLAIN.tokens, replace(PLAIN.stats, decode_seconds=12.0))
    finding = answer.judge_exact(PLAIN, slower, drafted(5.0, 50))
    assert (finding.verdict, "costs 20 %" in finding.figure.replace("20%", "20 %")) == (
        Verdict.OK,
        True,
    )
    other = drafted(5.0, 50, (*PLAIN.tokens[:40], 7, *PLAIN.tokens[41:]))
    assert answer.judge_exact(PLAIN, slower, other).verdict is Verdict.FAIL
    assert answer.judge_exact(PLAIN, slower, None).verdict is Verdict.OK


@pytest.mark.thorough
async def test_an_answer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model gives the requested tokens, their statistics and the cost of a pause."""
    monkeypatch.setattr("coordinator.doctor.answer.PAUSE_SECONDS", 0.1)
    found = await answer.measure_answer(Checkpoint.open(checkpoint_dir()), 0, 16, pause=True)
    assert len(found.tokens) == found.stats.completion_tokens == 16
    assert found.stats.decode_seconds > 0
    assert found.restart is not None
    assert found.restart > 0
