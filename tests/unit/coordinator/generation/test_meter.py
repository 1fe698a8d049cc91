"""Tests of speed, acceptance and stage times, computed from frames and their outcomes."""

from __future__ import annotations

import pytest

from coordinator.generation.frame_outcome import FrameOutcome
from coordinator.generation.meter import RATE_SECONDS, SMOOTHING, Meter
from coordinator.generation.request import PrefillProgress, TokenChunk
from mtp.depth.draft_result import DraftResult
from proto.frame import Frame, Segment

DECODE = (Segment(0, 0, position=5, tokens=(1,), open=True, sample=True),)
PROMPT = (Segment(0, 0, position=0, tokens=(1, 2, 3), sample=True),)


def outcome_of(tokens: int, *drafts: tuple[int, bool]) -> FrameOutcome:
    """Return the outcome of a frame with `tokens` emitted tokens and these draft results."""
    outcome = FrameOutcome(draft_results=[DraftResult(*one) for one in drafts])
    outcome.events.append((0, PrefillProgress(3, 3, 0)))
    if tokens:
        outcome.events.append((0, TokenChunk((7,) * tokens)))
    return outcome


def record(
    meter: Meter,
    now: float,
    tokens: int = 1,
    segments: tuple[Segment, ...] = DECODE,
    stage_us: tuple[int, ...] = (1000, 3000),
) -> None:
    """Record a frame in `meter`."""
    meter.record_frame(Frame(1, 0, segments=segments, stage_us=stage_us), outcome_of(tokens), now)


def test_acceptance_is_counted_by_position() -> None:
    """The first token of a speculative window is itself a draft, and is counted at its position."""
    meter = Meter()
    meter.record_frame(Frame(1, 0), outcome_of(2, (1, True), (2, False), (3, False)), 0.0)
    meter.record_frame(Frame(1, 1), outcome_of(1, (1, True)), 0.1)
    assert meter.drafts.drafted == [2, 1, 1]
    assert meter.drafts.accepted == [2, 0, 0]


def test_tokens_are_those_that_came_out() -> None:
    """A frame with an early prompt chunk adds no tokens."""
    meter = Meter()
    record(meter, 0.0, tokens=0, segments=PROMPT)
    assert meter.tokens_per_second(0.0) == 0.0
    record(meter, 1.0, tokens=1, segments=PROMPT)
    record(meter, 2.0, tokens=3)
    assert meter.tokens_per_second(3.0) == pytest.approx(4 / 2)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """Old tokens leave the rate, and an idle server reports zero."""
    meter = Meter()
    for second in range(20):
        record(meter, float(second), tokens=2)
    assert meter.tokens_per_second(19.0) == pytest.approx(2, rel=0.15)
    assert meter.tokens_per_second(19.0 + RATE_SECONDS + 0.1) == 0.0


def test_one_token_is_no_endless_rate() -> None:
    """Right after the first token the rate is still a readable number."""
    meter = Meter()
    record(meter, 5.0, segments=PROMPT)
    assert meter.tokens_per_second(5.0) <= 10


def test_stage_times_follow_the_newest_slowly_and_another_plan_at_once() -> None:
    """One slow step changes the average little. Another number of stages replaces it."""
    meter = Meter()
    record(meter, 0.0, stage_us=(1000, 3000))
    assert meter.stage_ms == [1.0, 3.0]
    record(meter, 0.1, stage_us=(2000, 3000))
    assert meter.stage_ms == pytest.approx([1 + SMOOTHING, 3.0])
    record(meter, 0.2, stage_us=(500, 600, 700))
    assert meter.stage_ms == [0.5, 0.6, 0.7]


def test_stage_times_are_those_of_decode_steps() -> None:
    """A prompt chunk of hundreds of tokens does not change the average decode step."""
    meter = Meter()
    record(meter, 0.0, stage_us=(1000,))
    record(meter, 0.1, tokens=0, segments=PROMPT, stage_us=(90_000,))
    record(meter, 0.2, segments=PROMPT, stage_us=(90_000,))
    assert meter.stage_ms == [1.0]


def test_an_unread_rate_does_not_grow() -> None:
    """The memory of the rate stays bounded if no client reads the rate."""
    meter = Meter()
    for second in range(1000):
        record(meter, float(second))
    assert len(meter._emitted) <= RATE_SECONDS + 1
