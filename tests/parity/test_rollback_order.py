"""All stages end in one state, that of the plain text, in any order of frames and signals."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest

from proto.frame import Commit, Frame, Segment
from proto.params import SamplingParams
from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain, Script, reject, same
from tests.support.stages.plain_text import Truth, truth

PROMPT = 3


class RandomOrder:
    """One sequence with random windows, stages that process frames at random times, and unreliable signals.

    Signals come late, twice or not at all. The result must be the plain text.
    """

    def __init__(self, path: Path, text: Truth, seed: int, cuts: tuple[int, ...]) -> None:
        self.random = random.Random(seed)
        self.text = text
        self.chain = Chain(path, cuts)
        self.script = Script(0, text.tokens[: text.prompt], text.params)
        self.signals: list[Commit] = []
        self.sent: deque[Segment] = deque()
        self.expects_acceptance = True
        """True while the coordinator expects every window in flight to be accepted."""
        self.skipped = 0

    def run(self, turns: int) -> None:
        prompt = self.script.chunk(self.text.prompt)
        self.script.apply_outcome(
            prompt, self.chain.send(prompt, ops=self.script.due()).outcomes[0]
        )
        for _ in range(turns):
            self.random.choices([self.send, self.step, self.signal], [2, 6, 3])[0]()
        for frame in self.chain.drain():
            self.settle(frame)
        self.chain.send(ops=self.script.due())

    def send(self) -> None:
        if (
            not self.expects_acceptance
            or len(self.sent) > 4
            or self.script.scheduled + 10 > len(self.text.tokens)
        ):
            return
        width = self.random.randint(1, 4)
        right = self.random.choice([width, width, width, self.random.randint(0, width)])
        if not self.sent:
            right = max(1, right)  # its first token is confirmed
        segment = self.script.window(self.text.window(self.script.scheduled, width, right))
        self.sent.append(segment)
        self.chain.post(segment, ops=self.script.due())

    def step(self) -> None:
        busy = [i for i, inbox in enumerate(self.chain.inboxes) if inbox]
        if not busy:
            return
        stage = self.random.choice(busy)
        frame = self.chain.step(stage)
        if stage + 1 == len(self.chain.inboxes):
            self.settle(frame)

    def signal(self) -> None:
        """Deliver any earlier signal to any stage, again or for the first time."""
        if self.signals:
            news = self.random.choice(self.signals)
            stage = self.random.randrange(len(self.chain.engines))
            reject(self.chain.engines[stage], 0, news.window, news.accepted_length)

    def settle(self, frame: Frame) -> None:
        segment, outcome = self.sent.popleft(), frame.outcomes[0]
        self.skipped += outcome.cancelled
        if outcome.cancelled:
            # The window was sent before the rejection was known. After the last of these, none is in flight.
            self.expects_acceptance = self.expects_acceptance or not self.sent
            return
        self.script.apply_outcome(segment, outcome)
        self.signals.append(Commit(0, segment.window, outcome.accepted_length))
        if outcome.accepted_length < segment.width:
            self.expects_acceptance = not self.sent


def _check_random_orders(path: Path, text: Truth, cuts: tuple[int, ...]) -> None:
    skipped, most = 0, 0
    for seed in range(10):
        order = RandomOrder(path, text, seed, cuts)
        order.run(turns=100)
        length = order.script.scheduled
        assert order.script.known == text.tokens[: len(order.script.known)]
        assert {e.sequences[0].stack.length for e in order.chain.engines} == {length}
        assert same(order.chain.state(0), text.states[length]), seed
        assert same(order.chain.head_state(0), text.head_states[length]), seed
        skipped += order.skipped
        most = max(most, length)
    assert most > 20 and (skipped > 10 or not cuts)


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3), (1, 2, 3)], ids=["1", "2", "3", "4 stages"])
def test_any_order_of_frames_and_signals(checkpoints: Checkpoints, cuts: tuple[int, ...]) -> None:
    """All stages and the head end in the state of a run over the accepted tokens, and these are the text.

    Frames pass in every possible order. Signals come in any order, twice or not at all.
    """
    path = checkpoints(layers=4)
    _check_random_orders(path, truth(path, PROMPT, 60), cuts)


def test_any_order_of_frames_and_signals_under_penalties(checkpoints: Checkpoints) -> None:
    """The same holds when every token depends on all tokens before it and on the noise of its position."""
    path = checkpoints(layers=4)
    params = SamplingParams(
        temperature=0.8, seed=4, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.6
    )
    _check_random_orders(path, Truth(path, PROMPT, 60, params=params), (1, 3))
