"""The state machine of open windows. Every stage holds a replica, which signals and headers change in any order."""

from __future__ import annotations

import pytest

from proto.errors import ProtocolError
from worker.cache.sequence_cache import NOTHING, CommitResult, OpenWindow, WindowStack


def _open(*widths: int) -> WindowStack:
    """Return a stack with a prompt of 10 tokens as window 0, then windows 1, 2, … of `widths`."""
    stack = WindowStack()
    stack.extend(0, 0, 10, stays_open=False)
    for number, width in enumerate(widths, start=1):
        stack.extend(number, stack.length, width, stays_open=True)
    return stack


# ---- what a commit does


def test_a_prompt_chunk_is_permanent_and_a_window_is_not() -> None:
    """`committed` counts the tokens that no rollback can remove."""
    stack = _open(3, 2)
    assert (stack.length, stack.committed) == (15, 10)
    assert stack.windows == [OpenWindow(1, 10, 3), OpenWindow(2, 13, 2)]


def test_a_rejection_drops_the_rest_of_its_window_and_all_later_ones() -> None:
    """A rejection in window 2 trims its other tokens and window 3. After a header the sequence is not stale."""
    stack = _open(3, 2, 4)
    assert stack.commit_window(2, 1, in_header=True) == CommitResult(whole=1, cut=1, trim=5)
    assert (stack.length, stack.committed, stack.windows, stack.stale) == (14, 14, [], False)


def test_segments_between_signal_and_header_are_stale() -> None:
    """Segments that arrive between signal and header are stale."""
    stack = _open(3, 2)
    stack.commit_window(1, 1, in_header=False)
    assert stack.stale
    assert stack.commit_window(1, 1, in_header=True) is NOTHING
    assert not stack.stale
    stack.extend(3, 11, 2, stays_open=True)
    assert stack.commit_window(1, 1, in_header=False) is NOTHING, "the signal may repeat, late"
    assert (stack.length, stack.stale) == (13, False)


def test_a_signal_for_an_unknown_window_is_ignored() -> None:
    """A signal for a window that never ran is ignored, because the header repeats it. A header for one is refused."""
    stack = _open(3)
    assert stack.commit_window(7, 1, in_header=False) is NOTHING
    assert (stack.length, stack.stale) == (13, False)
    with pytest.raises(ProtocolError, match="window 7, which is not open"):
        stack.commit_window(7, 1, in_header=True)


# ---- misuse


@pytest.mark.parametrize(
    ("number", "position", "width"),
    [(1, 13, 2), (0, 13, 2), (2, 12, 2), (2, 14, 2), (2, 13, 0)],
    ids=["number used", "number passed", "overlap", "gap", "no tokens"],
)
def test_a_segment_follows_the_sequence_or_is_refused(number: int, position: int, width: int) -> None:
    """A refused segment changes nothing."""
    stack = _open(3)
    with pytest.raises(ProtocolError, match="does not follow window 1, which ends at 13"):
        stack.extend(number, position, width, stays_open=True)
    assert stack == _open(3)


def test_a_prompt_chunk_may_not_follow_an_open_window() -> None:
    """A prompt chunk may not follow an open window, because the chunk would be permanent and the window is not."""
    stack = _open(3)
    with pytest.raises(ProtocolError, match="prompt chunk 2 follows open window 1"):
        stack.extend(2, 13, 4, stays_open=False)
    assert stack == _open(3)
