"""Speed, acceptance and stage times, from frames alone."""

from __future__ import annotations

import pytest

from coordinator.meter import RATE_SECONDS, SMOOTHING, Meter
from proto.frame import Frame, Outcome, Segment


def window(kept: int, drafts: int, *, cancelled: bool = False) -> tuple[Segment, Outcome]:
    """A window of one token and its drafts, of which `kept` tokens in all were right."""
    segment = Segment(0, 0, position=5, tokens=(1,) * (drafts + 1), open=True, sample=True)
    token = None if cancelled else 7
    return segment, Outcome(0, 0, kept, token, cancelled=cancelled)


def prompt(*, last: bool) -> tuple[Segment, Outcome]:
    """A prompt chunk; the last one of a prompt gives the first token."""
    segment = Segment(0, 0, position=0, tokens=(1, 2, 3), sample=last)
    return segment, Outcome(0, 0, 3, 7 if last else None)


def frame(*parts: tuple[Segment, Outcome], stage_us: tuple[int, ...] = (1000, 3000)) -> Frame:
    return Frame(
        1,
        0,
        segments=tuple(segment for segment, _ in parts),
        outcomes=tuple(outcome for _, outcome in parts),
        stage_us=stage_us,
    )


def test_acceptance_is_counted_by_position() -> None:
    """A draft is judged only where those before it were right, but every one proposed counts as drafted."""
    meter = Meter()
    meter.observe(frame(window(kept=3, drafts=3), window(kept=1, drafts=2)), 0.0)
    meter.observe(frame(window(kept=2, drafts=1)), 0.1)
    assert meter.drafted == [3, 2, 1]
    assert meter.accepted == [2, 1, 0]


def test_tokens_are_those_that_came_out() -> None:
    """Kept drafts and the token after them; the first one of a prompt; nothing of chunks before or of the cancelled."""
    meter = Meter()
    meter.observe(frame(prompt(last=False)), 0.0)
    assert meter.tokens_per_second(0.0) == 0.0
    meter.observe(frame(prompt(last=True)), 1.0)
    meter.observe(frame(window(kept=3, drafts=3), window(kept=0, drafts=2, cancelled=True)), 2.0)
    assert meter.tokens_per_second(3.0) == pytest.approx(4 / 2)
    assert meter.drafted == [1, 1, 1]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """Old tokens leave it; a server that has fallen silent says zero."""
    meter = Meter()
    for second in range(20):
        meter.observe(frame(window(kept=2, drafts=1)), float(second))
    assert meter.tokens_per_second(19.0) == pytest.approx(2, rel=0.15)
    assert meter.tokens_per_second(19.0 + RATE_SECONDS + 0.1) == 0.0


def test_one_token_is_no_endless_rate() -> None:
    """The moment after a first token the rate is a number people can read."""
    meter = Meter()
    meter.observe(frame(prompt(last=True)), 5.0)
    assert meter.tokens_per_second(5.0) <= 10


def test_stage_times_follow_the_newest_slowly_and_another_plan_at_once() -> None:
    """One slow step is no slow stage; times of other stages are no guess for these."""
    meter = Meter()
    meter.observe(frame(window(1, 0), stage_us=(1000, 3000)), 0.0)
    assert meter.stage_ms == [1.0, 3.0]
    meter.observe(frame(window(1, 0), stage_us=(2000, 3000)), 0.1)
    assert meter.stage_ms == pytest.approx([1 + SMOOTHING, 3.0])
    meter.observe(frame(window(1, 0), stage_us=(500, 600, 700)), 0.2)
    assert meter.stage_ms == [0.5, 0.6, 0.7]


def test_stage_times_are_those_of_decode_steps() -> None:
    """A prompt chunk of hundreds of tokens says nothing of the usual step."""
    meter = Meter()
    meter.observe(frame(window(1, 0), stage_us=(1000,)), 0.0)
    meter.observe(frame(prompt(last=False), stage_us=(90_000,)), 0.1)
    meter.observe(frame(prompt(last=True), stage_us=(90_000,)), 0.2)
    assert meter.stage_ms == [1.0]
