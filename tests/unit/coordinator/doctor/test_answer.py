"""The answers with and without drafts in the doctor's report."""

from __future__ import annotations

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
    ("seconds", "tokens", "place", "advice"),
    [
        (6.0, PLAIN.tokens, None, ""),
        (14.0, PLAIN.tokens, None, "do not pay"),
        (6.0, (*PLAIN.tokens[:40], 7, *PLAIN.tokens[41:]), 40, "--mtp off"),
    ],
)
def test_drafts_that_change_or_slow_an_answer_are_named(
    seconds: float, tokens: tuple[int, ...], place: int | None, advice: str
) -> None:
    """An answer that drafts change is a warning with the place, and so are drafts that do not pay."""
    finding = answer.judge_drafts(PLAIN, drafted(seconds, 50, tokens))
    assert finding.values["first_difference"] == place
    assert finding.values["tokens_per_window"] == 2.0
    assert finding.verdict is (Verdict.WARN if advice else Verdict.OK)
    assert advice in finding.advice


@pytest.mark.slow
async def test_an_answer_is_measured() -> None:
    """The built-in model gives the requested tokens, its speeds, and the names of its layers."""
    checkpoint = Checkpoint.open(checkpoint_dir())
    found = await answer.measure_answer(checkpoint, 0, 16)
    assert len(found.tokens) == found.stats.completion_tokens == 16
    values = answer.judge_answer(found).values
    assert values["prefill_tokens_per_second"] > 0
    assert values["tokens_per_second"] > 0
    assert values["layers"].startswith("8 ")
