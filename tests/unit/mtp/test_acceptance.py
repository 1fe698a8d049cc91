"""The acceptance of drafts, which keeps the tokens of plain sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mtp.sampling.choice import accepted_length, choose
from mtp.sampling.filters import History
from proto.params import SamplingParams


def ints(tokens: mx.array) -> list[int]:
    return [int(t) for t in np.array(tokens)]


def test_accepted_length_counts_the_token_and_leading_correct_drafts() -> None:
    """The accepted length counts the confirmed token and the drafts before the first wrong one.

    Later drafts that agree with their target do not count.
    """
    assert accepted_length([7], [1]) == 1
    assert accepted_length([7, 1, 2, 3], [1, 2, 3, 4]) == 4
    assert accepted_length([7, 1, 2, 3], [1, 9, 3, 4]) == 2
    assert accepted_length([7, 5, 2, 3], [1, 2, 3, 4]) == 1


def test_a_misspeculated_window_accepts_nothing() -> None:
    """A window whose first token differs from the expected token has an accepted length of 0."""
    assert accepted_length([7, 1], [1, 2], expected=7) == 2
    assert accepted_length([7, 1], [1, 2], expected=8) == 0


# ---- a toy model, whose next token hangs on the last one, and a head that is another


VOCAB = 12
TARGET = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(1)) * 2
HEAD = TARGET + mx.random.normal((VOCAB, VOCAB), key=mx.random.key(2)) * 1.2
STRANGER = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(3)) * 2
PROMPT = (3, 3, 5)
LENGTH = 60


def after(model: mx.array, tokens: Sequence[int]) -> mx.array:
    """Return the model's logits after each of `tokens`: `[n, vocab]`."""
    return model[mx.array(list(tokens))]


def plainly(params: SamplingParams, length: int = LENGTH) -> list[int]:
    """Return the toy model's text, generated one token a step."""
    history = History(VOCAB, len(PROMPT))
    history.extend(PROMPT)
    tokens = list(PROMPT)
    while len(tokens) < length:
        choice = choose(after(TARGET, tokens[-1:]), params, len(tokens), history)
        tokens += ints(choice)
        history.extend(tokens[-1:])
    return tokens


@dataclass
class Speculation:
    """The same text, with `depth` drafts a window and `ahead` windows verified at a time.

    The later windows assume that the earlier ones are accepted whole. `wasted` counts invalidated windows and `whole`
    counts fully accepted ones.
    """

    params: SamplingParams
    head: mx.array
    depth: int
    ahead: int = 1
    wasted: int = 0
    whole: int = 0

    def text(self, length: int = LENGTH) -> list[int]:
        history = History(VOCAB, len(PROMPT))
        history.extend(PROMPT[:-1])
        tokens = list(PROMPT)
        while len(tokens) < length:
            self._step(tokens, history)
        return tokens[:length]

    def _step(self, tokens: list[int], history: History) -> None:
        """Extend `tokens`. `history` holds all but the last of them, before and after."""
        width = self.depth + 1
        chain = [tokens[-1]]
        while len(chain) < self.ahead * width:
            choice = choose(
                after(self.head, chain[-1:]),
                self.params,
                len(tokens) - 1 + len(chain),
                history,
                chain,
            )
            chain += ints(choice)
        expected = tokens[-1]
        for start in range(0, len(chain), width):
            window, first = chain[start : start + width], len(tokens)
            targets = ints(choose(after(TARGET, window), self.params, first, history, window))
            count = accepted_length(window, targets, expected)
            if count == 0:
                self.wasted += 1
                return
            history.extend(window[:count])
            tokens += [*window[1:count], targets[count - 1]]
            expected = targets[count - 1]
            if count < width:
                return
            self.whole += 1


SETTINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=5),
    "filtered": SamplingParams(
        temperature=1.3, top_k=6, top_p=0.95, min_p=0.02, xtc_probability=0.5, seed=6
    ),
    "penalized": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logit_bias={2: 1.0},
        seed=7,
    ),
    "greedy penalized": SamplingParams(frequency_penalty=0.8, repetition_penalty=1.2),
}


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_speculative_text_is_plain_text(params: SamplingParams, depth: int) -> None:
    """Speculative text equals plain text token for token, for good and for useless heads.

    The cases include a second window in flight before the first has an outcome.
    """
    expected = plainly(params)
    for head in (HEAD, STRANGER):
        assert Speculation(params, head, depth).text() == expected
    assert Speculation(params, HEAD, depth, ahead=2).text() == expected


def test_the_identity_was_tried_on_kept_and_on_dropped_windows() -> None:
    """The test above covered fully accepted, partly accepted and invalidated windows."""
    speculation = Speculation(SETTINGS["sampled"], HEAD, depth=1, ahead=2)
    speculation.text(200)
    assert speculation.whole > 20
    assert speculation.wasted > 5
