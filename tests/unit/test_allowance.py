"""How long a frame may take is learned from those before it, of its size or of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proto.frame import Frame
from proto.segment import Segment
from worker.allowance import COMPILE_SECONDS, FIRST_SECONDS, NEW_SIZE_SECONDS, SLACK, Allowance


def frame(rows: int, position: int = 0, drafts: int = 0) -> Frame:
    """One sequence's rows, up to `position + rows`."""
    tokens = tuple(range(rows))
    return Frame(1, 0, segments=(Segment(1, 0, position, tokens, sample=True, drafts=drafts),))


def test_the_first_of_all_may_take_long() -> None:
    """Nobody knows yet how slow the machine is."""
    assert Allowance().seconds(frame(1)) == FIRST_SECONDS


def test_what_a_size_takes_is_learned() -> None:
    """Slower than any timeout, and so allowed; a hiccup moves it a little."""
    allowance = Allowance()
    allowance.observe(frame(512), 8.0)
    assert allowance.seconds(frame(512)) == SLACK * 8.0
    allowance.observe(frame(512), 13.0)
    assert allowance.seconds(frame(512)) == pytest.approx(SLACK * 9.0)


def test_a_new_size_is_judged_by_those_seen() -> None:
    """One with more rows may take as much longer, a small one no longer than a large one; either may compile its
    kernels; none is waited for without bound."""
    allowance = Allowance()
    allowance.observe(frame(1, position=7), 0.01)
    assert allowance.seconds(frame(4, position=4)) >= NEW_SIZE_SECONDS + SLACK * 0.01 * 4
    assert allowance.seconds(frame(512)) == FIRST_SECONDS
    allowance.observe(frame(256), 0.5)
    assert allowance.seconds(frame(128)) == NEW_SIZE_SECONDS + SLACK * 0.5


def test_kernels_compiled_on_the_way_have_their_time() -> None:
    """Where that takes long, each shape is new once: other rows of the same size, the first drafts, a longer text,
    another sequence. Then it is as everywhere: what compiling took is not what the next may take."""
    allowance = Allowance(compiles=True)
    known = frame(8, position=8)
    assert allowance.seconds(known) == COMPILE_SECONDS
    allowance.observe(known, 12.0)
    allowance.observe(known, 0.1)
    assert allowance.seconds(known) == SLACK * 0.1
    two = replace(known, segments=frame(4, position=12).segments * 2)
    for new in (frame(9, position=8), frame(8, 8, drafts=1), frame(8, position=30), two):
        assert allowance.seconds(new) == COMPILE_SECONDS
        allowance.observe(new, 12.0)
        assert allowance.seconds(new) <= NEW_SIZE_SECONDS + SLACK * 0.2
