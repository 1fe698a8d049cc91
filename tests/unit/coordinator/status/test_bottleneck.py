"""The advice about what would make a pipeline faster, from measured passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest

from coordinator.status.bottleneck import ADVICE_SECONDS, FEWEST_FRAMES, MeasuredPass, PassLog

NAMES = ("mac-1", "mac-2")


def passes(*pattern: float, step: float | None = None, count: int = 2 * FEWEST_FRAMES) -> PassLog:
    """Return a log of equal passes. `pattern` has the times of hop, stage, hop, stage and hop.

    Passes follow each other every `step` seconds, or one after another.
    """
    log = PassLog()
    for number in range(count):
        start = number * (step or sum(pattern))
        a, b, c, d, e = accumulate(pattern)
        log.record_pass(
            MeasuredPass(start, start + e, ((start + a, start + b), (start + c, start + d)))
        )
    return log


@pytest.mark.parametrize(
    ("pattern", "step", "advice"),
    [
        ((0.001, 0.01, 0.012, 0.01, 0.001), None, "mac-1 to mac-2 takes 35% of each pass"),
        ((0.001, 0.02, 0.001, 0.01, 0.001), 0.0205, "mac-1 computes 96% of the time, 1.3 times"),
        ((0.001, 0.01, 0.001, 0.01, 0.001), 0.0105, "only faster machines or more accepted drafts"),
        ((0.001, 0.01, 0.001, 0.012, 0.001), None, "mac-2, the busiest, computes 48% of the time"),
    ],
)
def test_the_advice_names_what_costs_most(
    pattern: tuple[float, ...], step: float | None, advice: str
) -> None:
    """The sentence differs for a slow link, an uneven cut, busy machines, and machines that wait for each other."""
    assert advice in passes(*pattern, step=step).explain(NAMES)


def test_a_few_passes_and_another_plan_give_no_advice() -> None:
    """The first frames compile, and times of another number of stages say nothing about this plan."""
    assert passes(0.001, 0.01, 0.001, 0.01, 0.001, count=FEWEST_FRAMES - 1).explain(NAMES) == ""
    log = passes(0.001, 0.01, 0.001, 0.01, 0.001)
    assert log.explain(("mac-1",)) == ""
    log.record_pass(MeasuredPass(9.0, 9.1, ((9.0, 9.1),)))
    assert log.explain(NAMES) == ""


def test_the_advice_is_computed_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page message contains the advice, so a look at all passes for each would cost tokens."""
    computed = []
    advise = PassLog._compute_advice

    def counted(log: PassLog, names: Sequence[str]) -> str:
        """Count the calls."""
        computed.append(names)
        return advise(log, names)

    monkeypatch.setattr(PassLog, "_compute_advice", counted)
    log = passes(0.001, 0.01, 0.001, 0.01, 0.001)
    before = log.explain(NAMES)
    end = log._passes[-1].returned_at
    for number in range(1, 4):
        start = end + number * ADVICE_SECONDS / 3
        log.record_pass(MeasuredPass(start - 0.1, start, ((start - 0.1, start), (start, start))))
        assert (log.explain(NAMES) == before) == (number < 3)
    assert len(computed) == 2
    log.explain(("a", "b"))
    assert len(computed) == 3
