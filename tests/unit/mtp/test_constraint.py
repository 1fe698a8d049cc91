"""Constraint: reasoning is closed at its budget and by the end of the answer, as a pure function of the answer."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from coordinator.text.grammars import OutputFormat
from mtp.sampling.constraint import Constraint, closing_tokens
from mtp.sampling.grammar import Answer
from proto.errors import ProtocolError, RequestError
from proto.params import SamplingParams
from tests.unit.mtp.test_grammar import compiled, encode, pending, vocabulary

SIZE, OPEN, CLOSE, BLANK = 40, 30, 31, 32
END = (5, 6, CLOSE)


def limited(budget: int, *, opened: bool = True) -> SamplingParams:
    """Return parameters with a limit. `opened` is True if the prompt has opened the reasoning."""
    return SamplingParams(
        reasoning_budget=budget, reasoning_end=END, reasoning_start=() if opened else (OPEN, BLANK), temperature=0.9
    )


def decoded(constraint: Constraint, answer: list[int], seed: int) -> list[int]:
    """Return 12 more tokens than `answer`, each drawn from the allowed ones, all of them the likeliest at times."""
    draw, found = random.Random(seed), list(answer)
    for _ in range(12):
        scores = mx.array([[draw.random() for _ in range(SIZE)]])
        found.append(int(np.argmax(np.array(constraint.mask(scores, pending(found))[0]))))
    return found


@pytest.mark.parametrize("budget", [0, 1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_reasoning_is_closed_at_its_budget(budget: int, seed: int) -> None:
    """The closing follows exactly `budget` tokens without the mark, and an earlier mark ends the limit."""
    constraint = Constraint.make(limited(budget), b"", SIZE)
    assert constraint is not None
    found = decoded(constraint, [], seed)
    if CLOSE in found[:budget]:
        return
    assert tuple(found[budget : budget + len(END)]) == END
    assert constraint.forced(pending(found[:budget])) == list(END)
    assert constraint.forced(pending(found[: budget + 1])) == list(END[1:])
    assert constraint.forced(pending(found[: budget + len(END)])) == []


@pytest.mark.parametrize(
    ("answer", "closes"),
    [
        ([OPEN, 1, 2], True),
        ([BLANK, BLANK, OPEN, 1, 2], True),
        ([1, OPEN, 1, 2], False),
        ([1, 2, 3, 4], False),
        ([OPEN, 1, CLOSE], False),
        ([OPEN, 1], False),
        ([BLANK] * 9 + [OPEN, 1, 2], False),
    ],
)
def test_reasoning_that_the_answer_opens(answer: list[int], closes: bool) -> None:
    """Only blank tokens may precede the opening; the budget counts from there."""
    assert closing_tokens(limited(2, opened=False), pending(answer), len(answer)) == (END if closes else ())


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 4, 11])
def test_windows_of_any_width_have_the_rows_of_single_tokens(budget: int, opened: bool) -> None:
    """A window across the budget, with right and wrong drafts, has the rows that its texts have alone.

    Outside the places that `needs_host` names no row is changed.
    """
    draw, params = random.Random(budget), limited(budget, opened=opened)
    constraint = Constraint.make(params, b"", SIZE)
    assert constraint is not None
    for _ in range(60):
        text = [draw.choice((1, 2, OPEN, CLOSE, BLANK, *END)) for _ in range(draw.randrange(18))]
        verified = draw.randrange(len(text) + 1)
        width = len(text) - verified
        if not width:
            continue
        logits = mx.array(np.random.default_rng(len(text)).normal(size=(width, SIZE)).astype(np.float32))
        rows = constraint.mask(logits, Answer([9, *text[:verified]], 1, tuple(text[verified:])))
        for row in range(width):
            length = verified + row + 1
            alone = constraint.mask(logits[row : row + 1], pending(text[:length]))
            assert mx.array_equal(rows[row : row + 1], alone)
            if not params.needs_host(length, length + 1):
                assert mx.array_equal(alone, logits[row : row + 1])


def test_an_end_token_ends_the_reasoning_while_a_format_waits() -> None:
    """In reasoning the end mark has the chance of all end tokens; after it the grammar decides alone."""
    grammar = compiled(OutputFormat("lark", 'start: "ab"', "x"))
    end, other, mark, text = 4089, 3, 7, encode("ab")
    params = SamplingParams(grammar=grammar, grammar_start=mark, reasoning_stops=(other, end))
    constraint = Constraint.make(params, vocabulary(), 4096)
    assert constraint is not None
    logits = mx.zeros((3, 4096))
    logits[:, end] = 2.0
    before = mx.array(logits)
    rows = constraint.mask(logits, pending([10, 11, mark]))
    assert mx.array_equal(logits, before), "the model's own logits are those of the log-probabilities"
    for row in rows[:2]:
        assert row[end].item() == row[other].item() == -np.inf
        assert row[mark].item() == pytest.approx(np.log(2 + np.exp(2.0)))
        chances = mx.softmax(logits[0])
        sum_of_ends = chances[end] + chances[other] + chances[mark]
        assert mx.softmax(row)[mark].item() == pytest.approx(sum_of_ends.item(), rel=1e-4)
    assert {int(i) for i in np.flatnonzero(np.isfinite(np.array(rows[2])))} <= {text[0], *encode("a")}
    (after,) = constraint.mask(logits[:1], pending([10, mark, *text]))
    assert [int(i) for i in np.flatnonzero(np.isfinite(np.array(after)))] == [end]


def test_a_grammar_begins_after_the_forced_end() -> None:
    """The closing of the budget ends with the grammar's start token, so the grammar follows it at once."""
    grammar = compiled(OutputFormat("lark", 'start: "ab"', "x"))
    params = SamplingParams(grammar=grammar, grammar_start=7, reasoning_budget=1, reasoning_end=(8, 7))
    constraint = Constraint.make(params, vocabulary(), 4096)
    assert constraint is not None
    answer = [10]
    while len(answer) < 3 + len(encode("ab")):
        answer += constraint.forced(pending(answer)) or [0]
    assert answer == [10, 8, 7, *encode("ab")]


def test_limits_from_the_wire_are_checked() -> None:
    """Fields survive the wire; wrong ones, and tokens beyond the vocabulary, are refused."""
    params = limited(4, opened=False)
    wire = {name: list(v) if isinstance(v, tuple) else v for name, v in params.to_wire().items()}
    assert SamplingParams.from_wire(wire) == params
    cases: list[Any] = [{"reasoning_budget": -1}, {"reasoning_end": ["a"]}, {"reasoning_end": []}]
    for wrong in [*cases, {"reasoning_stops": 3}]:
        with pytest.raises(ProtocolError):
            SamplingParams.from_wire(wire | wrong)
    with pytest.raises(ProtocolError, match="exceeds the vocabulary"):
        Constraint.make(params, b"", CLOSE)
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(reasoning_stops=tuple(range(2000)))
