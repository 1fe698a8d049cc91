"""The acceptance rules: coupled gives the tokens of plain sampling, and ratio gives its distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mtp.sampling import choice
from mtp.sampling.choice import accepted_length, choose, drawn, ratio_targets
from mtp.sampling.filters import History, Stream, filtered
from proto.params import SamplingParams
from tests.support.text.chi_square import chi_square, sigmas


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


# ---- coupled: a toy model, whose next token hangs on the last one, and a head that is another


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
def test_coupled_text_is_plain_text(params: SamplingParams, depth: int) -> None:
    """Coupled text equals plain text token for token, for good and for useless heads.

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


# ---- ratio


P = mx.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -mx.inf])
Q = mx.array([0.0, 1.5, -0.5, 1.0, -mx.inf, -1.0, 0.5, 0.0])
DRAWS = 20_000


def ratio_counts(p: mx.array, q: mx.array, draws: int = DRAWS, seed: int = 3) -> list[int]:
    """Return how often each token is the ratio rule's choice over `draws` positions, each with its own draft from q."""
    target = mx.broadcast_to(p, (draws, p.size))
    draft = mx.broadcast_to(q, (draws, q.size))
    drafts = drawn(draft, seed, 0, Stream.DRAFT)
    counts = Counter(ints(ratio_targets(target, draft, drafts, seed, 0)))
    return [counts[token] for token in range(p.size)]


def chances(scores: mx.array) -> list[float]:
    return [float(c) for c in np.array(mx.softmax(scores))]


def test_ratio_is_distributed_as_plain_sampling() -> None:
    """Ratio draws follow plain sampling: chi-square of 20,000 seeded draws stays below 4 sigmas.

    There are 6 degrees of freedom, as one of 8 tokens cannot occur. Power: a distribution 3 % away in total variation
    has sum(d^2 / p) >= 4 * .03^2, which adds 72 or more to the statistic. That exceeds the bound, 31, with probability
    > .99. The mistake of the next test is 17 % away.
    """
    assert sigmas(chi_square(ratio_counts(P, Q), chances(P)), 6) < 4


def test_ratio_keeps_as_many_drafts_as_any_rule_could() -> None:
    """The share of accepted drafts is 1 - TV(p, q), the bound of every coupling, within 4 standard errors."""
    target = mx.broadcast_to(P, (DRAWS, P.size))
    draft = mx.broadcast_to(Q, (DRAWS, Q.size))
    drafts = drawn(draft, 1, 0, Stream.DRAFT)
    share = float(np.mean(np.array(ratio_targets(target, draft, drafts, 1, 0) == drafts)))
    bound = sum(min(p, q) for p, q in zip(chances(P), chances(Q), strict=True))
    assert abs(share - bound) < 4 * math.sqrt(bound * (1 - bound) / DRAWS)


def ratio_text(depth: int, length: int) -> tuple[list[int], int]:
    """Return the toy model's text under the ratio rule, and the number of accepted drafts."""
    params = SamplingParams(temperature=1.0, seed=21, acceptance="ratio")
    tokens, accepted = [0], 0
    while len(tokens) < length:
        window, scores, first = [tokens[-1]], [], len(tokens)
        for i in range(depth):
            logits = after(SMALL_HEAD, window[-1:])
            scores.append(filtered(logits, params, first + i))
            window += ints(drawn(scores[-1], params.seed, first + i, Stream.DRAFT))
        target = filtered(after(SMALL, window), params, first)
        targets = ints(
            ratio_targets(target, mx.concatenate(scores), window[1:], params.seed, first)
        )
        count = accepted_length(window, targets)
        tokens += [*window[1:count], targets[count - 1]]
        accepted += count - 1
    return tokens, accepted


SMALL = TARGET[:4, :4]
SMALL_HEAD = HEAD[:4, :4]


def test_ratio_text_has_the_models_transitions() -> None:
    """Each token of a text of 2,500 follows the one before with the model's probabilities.

    The windows are accepted whole and in part, with hundreds of accepted and rejected drafts. Chi-square with 12
    degrees of freedom stays below 4 sigmas.
    """
    tokens, accepted = ratio_text(depth=2, length=2500)
    assert 1000 < accepted < 2000
    statistic = 0.0
    for before in range(4):
        counts = Counter(b for a, b in pairwise(tokens) if a == before)
        statistic += chi_square([counts[t] for t in range(4)], chances(SMALL[before]))
    assert sigmas(statistic, 12) < 4


def test_ratio_never_keeps_a_draft_the_target_forbids() -> None:
    """A token that a filter of the target removes is never chosen, even if q is certain of it."""
    sure = mx.array([-mx.inf] * 7 + [0.0])
    assert ratio_counts(P, sure, 500)[7] == 0


def test_ratio_with_equal_distributions_keeps_every_draft() -> None:
    """With p = q every draft is accepted, and the empty residual gives no undefined value.

    Rounding may still reject a draft, which is covered.
    """
    p = mx.softmax(P)[None]
    assert mx.array_equal(choice.residual(p, p), p)
    scores = mx.broadcast_to(P, (500, P.size))
    drafts = drawn(scores, 4, 0, Stream.DRAFT)
    assert ints(ratio_targets(scores, scores, drafts, 4, 0)) == ints(drafts)


def test_the_row_without_a_draft_is_plain_sampling() -> None:
    """The token after the last draft, and the only token of a window without drafts, are plain samples."""
    params = replace(SETTINGS["sampled"], acceptance="ratio")
    target = filtered(after(TARGET, [1, 2, 3]), params, 10)
    draft = filtered(after(HEAD, [1, 2]), params, 10)
    plain = ints(drawn(target, params.seed, 10))
    assert ints(ratio_targets(target, draft, [4, 5], params.seed, 10))[2] == plain[2]
    assert ints(ratio_targets(target[:1], draft[:0], [], params.seed, 10)) == plain[:1]


def test_ratio_decides_a_row_alone_as_in_its_window() -> None:
    """The ratio rule gives bit for bit the same targets for a window of four and for its rows one by one.

    A window whose last row has a draft of the next window gives them too.
    """
    target = after(TARGET, [1, 2, 3, 4])
    draft = after(HEAD, [1, 2, 3, 4])
    drafts = [5, 6, 7, 8]
    together = ints(ratio_targets(target, draft, drafts, 9, 40))
    for i in range(4):
        alone = ratio_targets(target[i : i + 1], draft[i : i + 1], drafts[i : i + 1], 9, 40 + i)
        assert ints(alone) == together[i : i + 1]
    shorter = ratio_targets(target, draft[:3], drafts[:3], 9, 40)
    assert ints(shorter)[:3] == together[:3]


def test_ratio_refuses_drafts_that_do_not_belong_to_the_rows() -> None:
    """Draft scores of another window are refused, because they would skew the distribution without a sign."""
    for count in (0, 1, 4):
        with pytest.raises(ValueError, match="drafts for 3 rows"):
            ratio_targets(mx.zeros((3, 4)), mx.zeros((count, 4)), [0] * count, 0, 0)
