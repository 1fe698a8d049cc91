"""The state machine of open windows: every stage is a replica of it, whatever news reaches it when."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto.errors import ProtocolError
from worker.cache.window_stack import NOTHING, OpenWindow, Settled, WindowStack

STAGES = 3


def _open(*widths: int) -> WindowStack:
    """A prompt of 10 tokens as window 0, then windows 1, 2, … of `widths`."""
    stack = WindowStack()
    stack.extend(0, 0, 10, stays_open=False)
    for number, width in enumerate(widths, start=1):
        stack.extend(number, stack.length, width, stays_open=True)
    return stack


# ---- what a commit does


def test_a_prompt_chunk_is_permanent_and_a_window_is_not() -> None:
    """`committed` counts what no rollback can take."""
    stack = _open(3, 2)
    assert (stack.length, stack.committed) == (15, 10)
    assert stack.windows == [OpenWindow(1, 10, 3), OpenWindow(2, 13, 2)]


@pytest.mark.parametrize("in_header", [False, True])
def test_keeping_a_window_whole_settles_those_before_it(in_header: bool) -> None:
    """The commit of window 2 says that 1 was right too; nothing leaves the sequence's end."""
    stack = _open(3, 2, 4)
    assert stack.commit(2, 2, in_header=in_header) == Settled(whole=2)
    assert (stack.length, stack.committed, stack.stale) == (19, 15, False)


def test_a_rejection_drops_the_rest_of_its_window_and_all_later_ones() -> None:
    """Of window 2 one token stays; the others and window 3 are trimmed; by header, nothing is stale after it."""
    stack = _open(3, 2, 4)
    assert stack.commit(2, 1, in_header=True) == Settled(whole=1, cut=1, dropped=1, trim=5)
    assert (stack.length, stack.committed, stack.windows, stack.stale) == (14, 14, [], False)


def test_a_window_built_on_a_vain_hope_keeps_nothing() -> None:
    """kept = 0 ends the sequence where that window began."""
    stack = _open(3, 2)
    assert stack.commit(2, 0, in_header=True) == Settled(whole=1, cut=0, dropped=0, trim=2)
    assert stack.length == 13


def test_after_a_signal_all_is_stale_until_the_header_says_the_same() -> None:
    """Between the two pieces of news, what arrives builds on what is gone."""
    stack = _open(3, 2)
    stack.commit(1, 1, in_header=False)
    assert stack.stale
    assert stack.commit(1, 1, in_header=True) is NOTHING
    assert not stack.stale
    stack.extend(3, 11, 2, stays_open=True)
    assert stack.commit(1, 1, in_header=False) is NOTHING, "the signal may come once more, late"
    assert (stack.length, stack.stale) == (13, False)


def test_a_signal_for_what_never_came_here_is_ignored() -> None:
    """The header will say it again; a header itself may not name what never ran."""
    stack = _open(3)
    assert stack.commit(7, 1, in_header=False) is NOTHING
    assert (stack.length, stack.stale) == (13, False)
    with pytest.raises(ProtocolError, match="window 7, which is not open"):
        stack.commit(7, 1, in_header=True)


def test_a_hope_of_which_nothing_is_kept_need_not_have_run() -> None:
    """Where its client was gone a stage has skipped it; what is told of it then changes nothing."""
    stack = WindowStack()
    stack.extend(0, 0, 3, stays_open=False)
    stack.extend(1, 3, 2, stays_open=True)
    assert stack.commit(2, 0, in_header=True) is NOTHING
    assert (stack.length, len(stack.windows), stack.stale) == (5, 1, False)


def test_a_cancelled_sequence_stays_stale() -> None:
    """Neither signal nor header brings it back."""
    stack = _open(3)
    stack.end()
    stack.commit(1, 1, in_header=False)
    stack.commit(1, 1, in_header=True)
    assert stack.stale


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
    """It would be permanent, and what it builds on is not."""
    stack = _open(3)
    with pytest.raises(ProtocolError, match="prompt chunk 2 follows open window 1"):
        stack.extend(2, 13, 4, stays_open=False)
    assert stack == _open(3)


@pytest.mark.parametrize("in_header", [False, True])
def test_a_commit_cannot_keep_more_than_there_is(in_header: bool) -> None:
    """A refused commit changes nothing."""
    stack = _open(3, 2)
    with pytest.raises(ProtocolError, match="keeps 4 of window 1's 3 tokens"):
        stack.commit(1, 4, in_header=in_header)
    assert stack == _open(3, 2)


# ---- replicas


@dataclass(frozen=True)
class Message:
    """A frame about one sequence: commits in its header, and perhaps a window."""

    commits: tuple[tuple[int, int], ...]
    window: OpenWindow | None
    right: int
    cancelled: bool = False


class Replicas(RuleBasedStateMachine):
    """Stages in a row, FIFO between them, and signals that reach any stage at any time, again, or never.

    The last stage judges each window when it arrives. The coordinator sends windows in hope until it hears of
    a rejection, then waits for the rest to return and goes on from what was kept.
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
        self.hoping = True

    @rule(width=st.integers(1, 5), right=st.integers(0, 5))
    @precondition(lambda self: self.hoping and len(self.out) < 5)
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
                self.hoping = False
        self.hoping = self.hoping or not self.out

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
        """Once all frames and the last header have passed, every stage holds what was kept, and nothing open."""
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
