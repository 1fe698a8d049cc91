"""How long a frame may take is learned from those before it, of its size or of others."""

from __future__ import annotations

import pytest

from proto.frame import Frame
from proto.segment import Segment
from worker.engine.deadline import FIRST_SECONDS, NEW_SIZE_SECONDS, SLACK, DeadlineEstimate


def frame(rows: int, position: int = 0) -> Frame:
    """One sequence's rows, up to `position + rows`."""
    return Frame(1, 0, segments=(Segment(1, 0, position, tuple(range(rows))),))


def test_the_first_of_all_may_take_long() -> None:
    """Nobody knows yet how slow the machine is."""
    assert DeadlineEstimate().seconds(frame(1)) == FIRST_SECONDS


def test_what_a_size_takes_is_learned() -> None:
    """Slower than any timeout, and so allowed; a hiccup moves it a little."""
    allowance = DeadlineEstimate()
    allowance.observe(frame(512), 8.0)
    assert allowance.seconds(frame(512)) == SLACK * 8.0
    allowance.observe(frame(512), 13.0)
    assert allowance.seconds(frame(512)) == pytest.approx(SLACK * 9.0)


def test_a_new_size_is_judged_by_those_seen() -> None:
    """One with more rows may take as much longer, a small one no longer than a large one; either may compile its
    kernels; none is waited for without bound."""
    allowance = DeadlineEstimate()
    allowance.observe(frame(1, position=7), 0.01)
    assert allowance.seconds(frame(4, position=4)) >= NEW_SIZE_SECONDS + SLACK * 0.01 * 4
    assert allowance.seconds(frame(512)) == FIRST_SECONDS
    allowance.observe(frame(256), 0.5)
    assert allowance.seconds(frame(128)) == NEW_SIZE_SECONDS + SLACK * 0.5


def test_any_frame_may_take_the_least() -> None:
    """Where kernels are compiled on the way; one that is slower anyway may take longer."""
    allowance = DeadlineEstimate(least=120.0)
    assert allowance.seconds(frame(1)) == 120.0
    allowance.observe(frame(1), 0.1)
    assert allowance.seconds(frame(1)) == allowance.seconds(frame(8)) == 120.0
    allowance.observe(frame(512), 40.0)
    assert allowance.seconds(frame(512)) == SLACK * 40.0
