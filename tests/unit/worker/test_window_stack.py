"""The state machine of open windows. Every stage holds a replica, which signals and headers change in any order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto.errors import ProtocolError
from worker.cache.sequence_cache import NOTHING, CommitResult, OpenWindow, WindowStack

STAGES = 3


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
    assert stack.commit(2, 1, in_header=True) == CommitResult(whole=1, cut=1, dropped=1, trim=5)
    assert (stack.length, stack.committed, stack.windows, stack.stale) == (14, 14, [], False)


def test_segments_between_signal_and_header_are_stale() -> None:
    """Segments that arrive between signal and header are stale."""
    stack = _open(3, 2)
    stack.commit(1, 1, in_header=False)
    assert stack.stale
    assert stack.commit(1, 1, in_header=True) is NOTHING
    assert not stack.stale
    stack.extend(3, 11, 2, stays_open=True)
    assert stack.commit(1, 1, in_header=False) is NOTHING, "the signal may repeat, late"
    assert (stack.length, stack.stale) == (13, False)


def test_a_signal_for_an_unknown_window_is_ignored() -> None:
    """A signal for a window that never ran is ignored, because the header repeats it. A header for one is refused."""
    stack = _open(3)
    assert stack.commit(7, 1, in_header=False) is NOTHING
    assert (stack.length, stack.stale) == (13, False)
    with pytest.raises(ProtocolError, match="window 7, which is not open"):
        stack.commit(7, 1, in_header=True)


# ---- misuse


@pytest.mark.parametrize(
    ("number", "position", "width"),
    [(1, 13, 2), (0, 13, 2), (2, 12, 2), (2, 14, 2), (2, 13, 0)],
    ids=["number used", "number passed", "overlap", "gap", "no tokens"],
)
def test_a_segment_follows_the_sequence_or_is_refused(
    number: int, position: int, width: int
) -> None:
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


# ---- replicas


@dataclass(frozen=True)
class Message:
    """A frame of one sequence: the commits of its header, and a window or None."""

    commits: tuple[tuple[int, int], ...]
    window: OpenWindow | None
    right: int
    cancelled: bool = False


class Replicas(RuleBasedStateMachine):
    """Stages in a row with FIFO order between them, and signals that reach any stage late, twice or never.

    The last stage decides each window when it arrives. The coordinator sends speculative windows until it gets a
    rejection. It then waits for the windows in flight and continues from the accepted tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [WindowStack() for _ in range(STAGES)]
        self.inboxes: list[deque[Message]] = [deque() for _ in range(STAGES)]
        self.out: deque[OpenWindow] = deque()
        self.news: list[tuple[int, int]] = []
        self.due: list[tuple[int, int]] = []
        self.end = 0
        self.number = 0
        self.expects_acceptance = True

    @rule(width=st.integers(1, 5), right=st.integers(0, 5))
    @precondition(lambda self: self.expects_acceptance and len(self.out) < 5)
    def send(self, width: int, right: int) -> None:
        window = OpenWindow(self.number, self.end, width)
        if not self.out:
            right = max(right, 1)
        self._post(window, min(right, width))
        self.out.append(window)
        self.end += width
        self.number += 1

    def _post(self, window: OpenWindow | None, right: int) -> None:
        self.inboxes[0].append(Message(tuple(self.due), window, right))
        self.due = []

    @rule(stage=st.integers(0, STAGES - 1))
    def step(self, stage: int) -> None:
        if not self.inboxes[stage]:
            return
        message, stack = self.inboxes[stage].popleft(), self.stacks[stage]
        for number, accepted_length in message.commits:
            stack.commit(number, accepted_length, in_header=True)
        window = message.window
        if window is not None and not message.cancelled:
            if stack.stale:
                message = Message(message.commits, window, message.right, cancelled=True)
            else:
                stack.extend(window.number, window.position, window.width, stays_open=True)
        if stage + 1 < STAGES:
            self.inboxes[stage + 1].append(message)
        elif window is not None:
            self._judge(window, message)

    def _judge(self, window: OpenWindow, message: Message) -> None:
        assert self.out.popleft() == window
        if not message.cancelled:
            self.stacks[-1].commit(window.number, message.right, in_header=False)
            self.news.append((window.number, message.right))
            self.due.append((window.number, message.right))
            if message.right < window.width:
                self.end = window.position + message.right
                self.expects_acceptance = False
        self.expects_acceptance = self.expects_acceptance or not self.out

    @rule(stage=st.integers(0, STAGES - 1), data=st.data())
    @precondition(lambda self: bool(self.news))
    def signal(self, stage: int, data: st.DataObject) -> None:
        number, accepted_length = data.draw(st.sampled_from(self.news))
        self.stacks[stage].commit(number, accepted_length, in_header=False)

    @invariant()
    def each_stack_is_sound(self) -> None:
        for stack in self.stacks:
            stack.check()

    def teardown(self) -> None:
        """After all frames and the last header every stage holds the accepted tokens and no open window."""
        for _ in range(2):
            for stage in range(STAGES):
                while self.inboxes[stage]:
                    self.step(stage)
            self._post(None, 0)
        for stage in range(STAGES):
            while self.inboxes[stage]:
                self.step(stage)
        for stack in self.stacks:
            assert (stack.length, stack.windows, stack.stale) == (self.end, [], False)
            assert stack.settled == max((number for number, _ in self.news), default=-1)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
