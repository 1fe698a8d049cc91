"""A stage after any rollback has, bit for bit, the state of a stage that was fed the accepted tokens alone.

This holds whatever was drafted and in whatever way the rejection arrived.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from proto.errors import ProtocolError
from proto.frame import Commit, Evict, Frame, Outcome, Segment
from proto.params import SamplingParams
from tests.conftest import Checkpoints
from tests.support.stages.chain import Chain, Script, reject, same
from tests.support.stages.plain_text import Truth, kv_format, truth

LONGEST = 5
"""Tokens in the widest window of these tests."""

PROMPTS = (3, 6, 11)
KV_BITS = (None, 8, 4)


@dataclass(frozen=True)
class Case:
    """Windows of `widths`, open together. Those before window `cut` are accepted whole.

    Window `cut` accepts `accepted_length` of its tokens.
    """

    widths: tuple[int, ...]
    cut: int
    accepted_length: int


def _cases(count: int) -> list[Case]:
    """Return every width and accepted length for each of `count` windows. 0 occurs for speculative windows only."""
    cases = []
    for cut in range(count):
        for width in range(1, LONGEST + 1):
            whole = width if cut == count - 1 else width - 1
            for accepted_length in range(0 if cut else 1, whole + 1):
                others = (1 + (width + accepted_length + i) % LONGEST for i in range(count))
                widths = tuple(width if i == cut else w for i, w in enumerate(others))
                cases.append(Case(widths, cut, accepted_length))
    return cases


@dataclass
class Row:
    """One case in progress: its text, its script and the outcomes of its windows."""

    case: Case
    truth: Truth
    script: Script
    segments: list[Segment] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that the sequence has in the end."""
        return self.truth.prompt + sum(self.case.widths[: self.case.cut]) + self.case.accepted_length

    def send(self) -> Segment:
        index = len(self.segments)
        right = self.case.accepted_length if index >= self.case.cut else LONGEST
        start, width = self.script.scheduled, self.case.widths[index]
        tokens = self.truth.window(start, width, right if index == self.case.cut else width)
        self.segments.append(self.script.window(tokens))
        return self.segments[-1]

    def check(self, outcome: Outcome, index: int) -> None:
        width = self.case.widths[index]
        expected = width if index < self.case.cut else self.case.accepted_length
        if index > self.case.cut and self.case.accepted_length < self.case.widths[self.case.cut]:
            assert outcome.cancelled
            return
        assert (outcome.accepted_length, outcome.cancelled) == (expected, False), (self.case, index)
        self.commits.append(Commit(self.script.seq_id, outcome.window, outcome.accepted_length))


def _signal(chain: Chain, stages: tuple[int, ...], rows: list[Row]) -> None:
    """Signal each row's rejection to some stages. The acceptance of the windows before it is not signalled."""
    for stage in stages:
        for row in rows:
            commit = row.commits[-1]
            reject(chain.engines[stage], commit.seq_id, commit.window, commit.accepted_length)


NEWS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    "header alone": ((), 1, ()),
    "signal, then header": ((0, 1, 2), 1, ()),
    "header, then signal": ((), 1, (0, 1, 2)),
    "all of it twice": ((0, 1, 2, 0, 1, 2), 2, (0, 1, 2)),
    "signal to one stage": ((1,), 1, ()),
}
"""For each case: stages that get the signal before the header, the number of headers, and stages that get it after."""


def _open_windows(chain: Chain, rows: list[Row]) -> None:
    """Prefill all rows, then open their windows. Each stage runs all frames before the next stage starts."""
    prompts = [row.script.chunk(row.truth.prompt) for row in rows]
    chain.send(*prompts, ops=[op for row in rows for op in row.script.due()])
    for _ in rows[0].case.widths:
        chain.post(*(row.send() for row in rows))
    for index, frame in enumerate(chain.drain()):
        for row, outcome in zip(rows, frame.outcomes, strict=True):
            row.check(outcome, index)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 3))])
def test_every_width_and_accepted_length(checkpoints: Checkpoints, count: int, bits: int | None) -> None:
    """Rows of one frame roll back to different accepted lengths, and match a run over the accepted tokens.

    One to three windows of 1 to 5 tokens are open. State and next logits are compared. Quantized K/V is bit-equal too,
    because the K/V of each token is quantized alone.
    """
    path = checkpoints(layers=5)
    truths = [truth(path, prompt, 4 * LONGEST, bits) for prompt in PROMPTS]
    for name, (before, times, after) in NEWS.items():
        if bits is not None and name != "signal to one stage":
            continue
        chain = Chain(path, (1, 4), kv_format(bits))  # GDN, both kinds, GDN
        rows = []
        for i, case in enumerate(_cases(count)):
            text = truths[i % len(truths)]
            rows.append(Row(case, text, Script(i, text.tokens[: text.prompt])))
        _open_windows(chain, rows)
        _signal(chain, before, rows)
        chain.send(ops=[c for row in rows for c in row.commits] * times)
        _signal(chain, after, rows)
        _check_ends(chain, rows)


def _check_ends(chain: Chain, rows: list[Row]) -> None:
    for row in rows:
        seq_id, length = row.script.seq_id, row.length
        assert {engine.sequences[seq_id].stack.length for engine in chain.engines} == {length}
        assert same(chain.state(seq_id), row.truth.states[length]), row.case
        row.script.scheduled = length
    report_state = [s for engine in chain.engines for s in engine.report_state().sequences]
    assert not any(held.open_windows for held in report_state)
    chain.send(*(row.script.window(row.truth.tokens[row.length :][:1]) for row in rows))
    for row in rows:
        logits = chain.logits[row.script.seq_id][0]
        assert mx.array_equal(logits, row.truth.logits[row.length + 1]), row.case


# ---- frames on their way


def test_invalidated_frames_are_forwarded_as_cancelled(checkpoints: Checkpoints) -> None:
    """A stage that got a rejection forwards later windows as cancelled, without rows.

    A stage after it that got no signal forwards them too. A stage before it runs them and ends in the same state.
    """
    text = truth(checkpoints(), PROMPTS[0], 4 * LONGEST)
    chain = Chain(checkpoints(), (2, 4, 6))
    script = Script(0, text.tokens[: text.prompt])
    chain.send(script.chunk(text.prompt), ops=script.due())
    start = script.scheduled
    first = script.window(text.window(start, 3, right=2))
    chain.post(first)
    rejection = chain.drain()[0].outcomes[0]
    assert rejection.accepted_length == 2
    for _ in range(2):
        chain.post(script.window(text.window(script.scheduled, 2, right=0)))
    assert [chain.step(0).segments[0].cancelled for _ in range(2)] == [False, False]
    chain.engines[1].rollback(1, 0, first.window, 1)
    passed = [chain.step(1) for _ in range(2)]
    assert all(f.segments[0].cancelled and f.rows == 0 and f.dtype == "" for f in passed)
    lengths = [engine.sequences[0].stack.length for engine in chain.engines]
    assert lengths == [start + 7, start + 2, start + 3, start + 2]
    assert all(frame.outcomes[0].cancelled for frame in chain.drain())
    chain.send(ops=[Commit(0, first.window, 2)])
    assert same(chain.state(0), text.states[start + 2])


def test_rows_of_a_stale_sequence_are_taken_out_of_the_frame(checkpoints: Checkpoints) -> None:
    """A stage that skips one sequence of a frame computes the right rows of the others."""
    path = checkpoints()
    texts = [truth(path, prompt, 4 * LONGEST) for prompt in PROMPTS]
    chain = Chain(path, (4,))
    scripts = [Script(i, text.tokens[: text.prompt]) for i, text in enumerate(texts)]
    prompts = [script.chunk(script.scheduled + text.prompt) for script, text in zip(scripts, texts, strict=True)]
    chain.send(*prompts, ops=[op for script in scripts for op in script.due()])
    chain.send(scripts[1].window(texts[1].window(scripts[1].scheduled, 2, right=1)))
    widths = (2, 3, 4)
    chain.post(*(s.window(t.window(s.scheduled, w, right=w)) for s, t, w in zip(scripts, texts, widths, strict=True)))
    outcomes = chain.drain()[0].outcomes
    assert [(o.accepted_length, o.cancelled) for o in outcomes] == [
        (2, False),
        (0, True),
        (4, False),
    ]
    for script, text, width in zip(scripts, texts, widths, strict=True):
        if script.seq_id != 1:
            end = text.prompt + width
            assert mx.array_equal(chain.logits[script.seq_id][-1], text.logits[end])


# ---- cancel and evict


def _phases(chain: Chain, script: Script, text: Truth) -> Iterator[str]:
    """Yield the phases of a sequence in which its client may leave."""
    chain.post(script.chunk(4), ops=script.due())
    yield "admit on its way"
    chain.step(0)
    yield "first chunk in the middle"
    chain.drain()
    yield "between chunks"
    chain.post(script.chunk(text.prompt))
    chain.step(0)
    yield "last chunk in the middle"
    chain.drain()
    chain.post(script.window(text.window(script.scheduled, 3, right=1)))
    chain.step(0)
    chain.post(script.window(text.window(script.scheduled, 2, right=0)))
    chain.step(1)
    yield "two windows in the middle"
    chain.drain()
    yield "rejected, and nobody told"
    reject(chain.engines[0], 0, 2, 1)
    yield "rejected, and one stage told"


def test_a_client_may_leave_in_every_phase(checkpoints: Checkpoints) -> None:
    """A cancelled request leaves no state on any stage, in whatever phase it was.

    The cancellation reaches any of the stages or none, and a header evicts the sequence later. Frames keep their order
    and another sequence continues.
    """
    path = checkpoints(layers=4)
    text = truth(path, PROMPTS[2], 4 * LONGEST)
    phase = 0
    while True:
        for told in ((), (0,), (1,), (0, 1, 2)):
            chain = Chain(path, (1, 3))
            other = Script(1, text.tokens[: text.prompt])
            other.run(chain, other.chunk(text.prompt))
            script = Script(0, text.tokens[: text.prompt])
            names = list(zip(range(phase + 1), _phases(chain, script, text), strict=False))
            if len(names) <= phase:
                assert phase == 7
                return
            for stage in told:
                chain.engines[stage].cancel(1, 0)
            chain.post(ops=[Evict(0)])
            chain.drain()
            for engine in chain.engines:
                assert [s.seq_id for s in engine.report_state().sequences] == [1], names[-1]
            assert list(chain.verifier.states) == [1]
            other.run(chain, other.next_window())
            assert mx.array_equal(chain.logits[1][0], text.logits[text.prompt + 1])
        phase += 1


def test_signals_of_other_plans_or_sequences_are_ignored(checkpoints: Checkpoints) -> None:
    """A signal of an older plan, of an unknown sequence, or of more tokens than a window has changes nothing."""
    text = truth(checkpoints(), PROMPTS[0], 4 * LONGEST)
    chain = Chain(checkpoints(), (4,))
    script = Script(0, text.tokens[: text.prompt])
    chain.send(script.chunk(text.prompt), ops=script.due())
    chain.post(script.window(text.window(script.scheduled, 3, right=3)))
    chain.step(0)
    for engine in chain.engines:
        engine.rollback(0, 0, 1, 1)
        engine.cancel(0, 0)
        engine.rollback(1, 7, 1, 1)
        engine.cancel(1, 7)
        engine.rollback(1, 0, 9, 1)
    with pytest.raises(ProtocolError, match="-1 tokens of window 1, which has 3"):
        chain.engines[0].rollback(1, 0, 1, 4)
    stacks = [engine.sequences[0].stack for engine in chain.engines]
    assert [(s.length, s.stale) for s in stacks] == [
        (script.scheduled, False),
        (text.prompt, False),
    ]
    outcome = chain.drain()[0].outcomes[0]
    assert (outcome.accepted_length, outcome.cancelled) == (3, False)


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
        self.script.apply_outcome(prompt, self.chain.send(prompt, ops=self.script.due()).outcomes[0])
        for _ in range(turns):
            self.random.choices([self.send, self.step, self.signal], [2, 6, 3])[0]()
        for frame in self.chain.drain():
            self.settle(frame)
        self.chain.send(ops=self.script.due())

    def send(self) -> None:
        if not self.expects_acceptance or len(self.sent) > 4 or self.script.scheduled + 10 > len(self.text.tokens):
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
    params = SamplingParams(temperature=0.8, seed=4, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.6)
    _check_random_orders(path, Truth(path, PROMPT, 60, params=params), (1, 3))
