"""Noise, filters, penalties and the choice of a token are the same in any window and have the right distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from mtp.sampling.sampler import (
    Draft,
    History,
    accepted_length,
    adjusted,
    choose,
    choose_with_keys,
    draw,
    filtered,
    gumbel,
    gumbel_of,
    key,
    key_array,
    logprobs,
    ratio_choice,
    shared_settings,
)
from proto.errors import ProtocolError, RequestError
from proto.params import SamplingParams
from tests.support.text.chi_square import chi_square, sigmas

VOCAB = 300
PLAIN = SamplingParams(temperature=1.0, seed=11)
SETTINGS = {
    "greedy": SamplingParams(),
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.3),
    "top_k": replace(PLAIN, top_k=20),
    "top_p": replace(PLAIN, top_p=0.8),
    "min_p": replace(PLAIN, min_p=0.05),
    "xtc": replace(PLAIN, xtc_probability=0.5, xtc_threshold=0.05, xtc_exempt=(5, 7)),
    "penalties": replace(PLAIN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "greedy penalties": SamplingParams(frequency_penalty=1.5, logit_bias={3: 2.0}),
    "all": SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        xtc_probability=0.5,
        xtc_threshold=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        logit_bias={5: 3.0, 6: -100.0},
        seed=2**64 - 1,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_chosen_together_are_those_chosen_alone(name: str) -> None:
    """Rows of several sequences with equal settings get, bit for bit, the tokens that each sequence gets alone."""
    params = SETTINGS[name]
    if shared_settings(params) is None:
        assert params.penalized or params.logit_bias, "these rows could be chosen together"
        return
    logits = some_logits(6)
    places = [(7, 40), (7, 41), (8, 3), (9, 90), (9, 91), (9, 92)]
    alone = [
        choose(logits[i : i + 1], replace(params, seed=seed), position) for i, (seed, position) in enumerate(places)
    ]
    assert choose_with_keys(logits, params, lambda: key_array(places)).tolist() == mx.concatenate(alone).tolist()


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> mx.array:
    """Return logits `[rows, vocab]` that are peaked like a model's."""
    return mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 3


def history_of(tokens: list[int], prompt: int = 0, vocab: int = VOCAB) -> History:
    history = History(vocab, prompt)
    history.extend(tokens)
    return history


def ints(tokens: mx.array) -> list[int]:
    return [int(t) for t in np.array(tokens)]


def row(scores: mx.array) -> list[float]:
    """Return the only row of `scores`."""
    assert scores.shape[0] == 1
    return [float(score) for score in np.array(scores[0])]


# ---- one answer, whatever the window


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_window_of_five_chooses_what_five_windows_of_one_choose(params: SamplingParams) -> None:
    """Scores and tokens are bit for bit independent of how many rows are computed together.

    Row k alone, after the tokens before it are committed, equals row k of the window.
    """
    logits = some_logits(5)
    past, window = [7, 7, 9, 200], [9, 1, 1, 250, 3]
    history = history_of(past, prompt=2)
    together = choose(logits, params, 4, history, window)
    for i in range(5):
        settled = history_of(past + window[: i + 1], prompt=2)
        alone = logits[i : i + 1]
        assert choose(alone, params, 4 + i, settled).item() == together[i].item()
        assert choose(alone, params, 4 + i, history, mx.array(window[: i + 1])).item() == (together[i].item())
        if not params.greedy:
            keys = key_array([(params.seed, 4 + row) for row in range(5)])
            scores = filtered(logits, params, history, window, keys)
            assert mx.array_equal(filtered(alone, params, settled, keys=keys[i : i + 1]), scores[i : i + 1])


def test_choosing_takes_drafts_that_are_not_evaluated_yet() -> None:
    """A chain of drafts is penalized for its own tokens while they are still lazy arrays."""
    params = SETTINGS["penalties"]
    history = history_of([1, 2, 3])
    logits = some_logits(3)
    chain = mx.array([4], mx.int32)
    for i in range(3):
        chain = mx.concatenate([chain, choose(logits[i : i + 1], params, 3 + i, history, chain)])
    tokens = ints(chain)
    assert ints(choose(logits, params, 3, history, tokens[:3])) == tokens[1:]


# ---- noise


def test_noise_is_the_same_in_every_release() -> None:
    """A seed gives the same noise in every release. These keys were recorded once."""
    assert key(0, 0) == (2802244911, 1293516399)
    assert key(2**64 - 1, 262_143) == (2447752638, 966834384)


def test_no_two_noises_of_a_seed_share_a_key() -> None:
    """Every position has its own key, also between neighbouring seeds."""
    keys = {key(seed, position) for seed in (0, 1, 2) for position in range(5000)}
    assert len(keys) == 3 * 5000


def test_positions_are_uncorrelated() -> None:
    """Neighbouring positions and neighbouring seeds have no correlation beyond 5 standard errors of 20,000 draws."""
    count = 20_000
    places = ((1, 0), (1, 1), (2, 0))
    draws = [np.array(gumbel(seed, range(at, at + count), 1))[:, 0] for seed, at in places]
    off_diagonal = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(off_diagonal).max() < 5 / math.sqrt(count)


def test_gumbel_noise_has_gumbel_quantiles() -> None:
    """A million values follow exp(-exp(-x)) within 5 standard errors at every hundredth, and all are finite."""
    values = np.sort(np.array(gumbel(3, range(100), 10_000)).ravel())
    assert np.isfinite(values).all()
    share = np.linspace(0.01, 0.99, 99)
    found = np.searchsorted(values, -np.log(-np.log(share))) / values.size
    assert (np.abs(found - share) < 5 * np.sqrt(share * (1 - share) / values.size)).all()


def test_gumbel_noise_reaches_beyond_the_steps_of_fp32() -> None:
    """Noise exceeds 16.6, where a uniform number near 1 has its last fp32 step.

    With this seed 20 million draws exceed it. Noise made from u near 1 never could.
    """
    largest = gumbel(0, range(400), 50_000).max()
    assert np.array(largest) > 17


def test_a_draw_follows_the_softmax() -> None:
    """Draws follow the softmax: chi-square with 7 degrees of freedom over 20,000 positions stays below 4 sigmas.

    A distribution 3 % away in total variation would exceed that with probability > .99.
    """
    logits = mx.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    tokens = choose(mx.broadcast_to(logits, (20_000, 8)), SamplingParams(temperature=1.0, seed=9), 0)
    counts = Counter(ints(tokens))
    chances = row(mx.softmax(logits)[None])
    assert sigmas(chi_square([counts[t] for t in range(8)], chances), 7) < 4


# ---- filters, against mlx-lm's where both have one


@pytest.fixture
def eager() -> Iterator[None]:
    """Replace mx.compile, because mlx-lm's compiled filters take seconds on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def survivors(scores: mx.array) -> list[set[int]]:
    return [set(np.flatnonzero(np.isfinite(r)).tolist()) for r in np.array(scores)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        *(("top_k", count) for count in (1, 2, 7, VOCAB - 1)),
        *(("top_p", share) for share in (0.05, 0.5, 0.9, 0.999)),
        *(("min_p", share) for share in (0.001, 0.1, 1.0)),
    ],
)
def test_a_filter_keeps_what_mlx_lm_keeps(name: str, bound: Any) -> None:
    """Each filter leaves the same tokens of every row as in mlx-lm."""
    logits = some_logits(4)
    ours = filtered(logits, replace(PLAIN, **{name: bound}))
    theirs = getattr(sample_utils, f"apply_{name}")(log_softmax(logits), bound)
    assert survivors(ours) == survivors(theirs)


@pytest.mark.usefixtures("eager")
def test_xtc_removes_what_mlx_lm_removes() -> None:
    """XTC removes all tokens above the threshold but the least likely, and never an exempt token."""
    logits = mx.array([[3.0, 2.5, 2.0, 0.0, -1.0], [9.0, 0.0, 0.0, 0.0, 0.0]])
    keys = key_array([(1, 0), (1, 1)])
    for exempt, expected in ((), [{2, 3, 4}, set(range(5))]), ((0,), [{0, 2, 3, 4}, set(range(5))]):
        params = replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.1, xtc_exempt=exempt)
        theirs = sample_utils.apply_xtc(log_softmax(logits), 1.0, 0.1, list(exempt))
        assert survivors(filtered(logits, params, keys=keys)) == survivors(theirs) == expected
        assert SamplingParams.from_wire(msgpack.unpackb(msgpack.packb(params.to_wire()))) == params


def test_xtc_acts_at_its_share_of_positions() -> None:
    """XTC with probability .3 acts at 3 of 10 positions, within 5 standard errors of 5,000.

    Each position has a fixed decision, which does not depend on the noise of its token.
    """
    count = 5000
    logits = mx.broadcast_to(mx.array([3.0, 2.5, 2.0, 0.0]), (count, 4))
    params = replace(PLAIN, xtc_probability=0.3)
    keys = key_array([(params.seed, position) for position in range(count)])
    acted = np.isinf(np.array(filtered(logits, params, keys=keys)[:, 0]))
    assert abs(acted.mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / count)
    again = np.isinf(np.array(filtered(logits[:100], params, keys=keys[1234:1334])[:, 0]))
    assert (again == acted[1234:1334]).all()
    noise = np.array(gumbel_of(keys, 1))[:, 0]
    assert abs(np.corrcoef(acted, noise)[0, 1]) < 5 / math.sqrt(count)


def test_filters_follow_vllms_order() -> None:
    """Temperature comes before the filters, and min-p and top-k before top-p, which renormalizes their result."""
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    # T = 0.5 squares the odds: .533, .3, .133, .033.
    assert survivors(filtered(logits, replace(PLAIN, temperature=0.5, top_p=0.8))) == [{0, 1}]
    assert survivors(filtered(logits, replace(PLAIN, top_p=0.8))) == [{0, 1, 2}]
    # Of the two best alone, the first has 4/7 > .55.
    assert survivors(filtered(logits, replace(PLAIN, top_k=2, top_p=0.55))) == [{0}]
    assert survivors(filtered(logits, replace(PLAIN, min_p=0.7, top_p=0.55))) == [{0}]
    assert survivors(filtered(logits, replace(PLAIN, top_p=0.55))) == [{0, 1}]


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    """Tokens that tie with the last one left by a filter stay, so the order of a sort does not matter."""
    logits = mx.array([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert survivors(filtered(logits, replace(PLAIN, top_k=2))) == [{0, 1, 2, 3}]
    assert survivors(filtered(logits, replace(PLAIN, top_p=0.5))) == [{0, 1, 2, 3}]


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(1e-30, 100),
    top_k=st.integers(0, 20),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
    xtc=st.floats(0, 1),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_every_row_keeps_a_token(
    temperature: float, top_k: int, top_p: float, min_p: float, xtc: float, scale: float
) -> None:
    """Every combination of filters leaves a token, without NaN or scores above 0, and the choice is one of them."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, xtc_probability=xtc)
    logits = some_logits(3, vocab=16) * scale
    scores = np.array(filtered(logits, params, keys=key_array([(0, 5 + row) for row in range(3)])))
    assert not np.isnan(scores).any()
    assert scores.max() <= 0
    assert np.isfinite(scores).any(axis=1).all()
    chosen = ints(choose(logits, params, 5))
    assert all(np.isfinite(scores[i, token]) for i, token in enumerate(chosen))


def test_a_temperature_next_to_zero_is_greedy() -> None:
    """A temperature so small that 1/T overflows fp32 (below 1e-38) gives the best token, not the first."""
    logits = some_logits(5)
    params = replace(PLAIN, temperature=1e-300)
    assert not np.isnan(np.array(filtered(logits, params))).any()
    assert ints(choose(logits, params, 0)) == ints(mx.argmax(logits, axis=-1))


def test_greedy_takes_the_best_token_whatever_the_filters() -> None:
    """A greedy choice ignores all filters, XTC included, and takes the first of equal tokens."""
    logits = mx.array([[0.0, 3.0, 3.0, 2.0]])
    params = SamplingParams(top_k=3, min_p=0.1, top_p=0.9, xtc_probability=1.0)
    assert {choose(logits, params, position).item() for position in range(50)} == {1}


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    """A bias outside the vocabulary is refused with the field's name. It would write into other memory."""
    for token in (3, -1):
        with pytest.raises(RequestError, match="logit_bias token") as caught:
            adjusted(mx.zeros((1, 3)), SamplingParams(logit_bias={token: 1.0}))
        assert caught.value.param == "logit_bias"


# ---- penalties


def test_penalties_follow_their_definition() -> None:
    """Repetition divides positive and multiplies negative logits of every token in prompt and output.

    Frequency subtracts by count and presence once, for tokens of the output only.
    """
    logits = mx.array([[4.0, -4.0, 4.0, 4.0]])
    history = history_of([0, 1, 2, 2], prompt=2, vocab=4)
    repeated = SamplingParams(repetition_penalty=2.0)
    assert row(adjusted(logits, repeated, history)) == [2.0, -8.0, 2.0, 4.0]
    frequent = SamplingParams(frequency_penalty=0.5)
    assert row(adjusted(logits, frequent, history)) == [4.0, -4.0, 3.0, 4.0]
    present = SamplingParams(presence_penalty=0.5)
    assert row(adjusted(logits, present, history)) == [4.0, -4.0, 3.5, 4.0]


def test_history_counts_what_a_list_would() -> None:
    """The history has the counts of plain lists through growth, rollback and the rows of an open window.

    Prompt and output are counted separately.
    """
    vocab, prompt = 12, 6
    history, plain = History(vocab, prompt), [0] * 0
    rng = np.random.default_rng(0)
    for _ in range(60):
        added = rng.integers(0, vocab, rng.integers(0, 4)).tolist()
        plain += added
        history.extend(added)
        window = rng.integers(0, vocab, 4).tolist()
        in_prompt, in_output = history.counts(window, rows=3)
        for i in range(3):
            past = plain + window[: 2 + i]
            assert in_prompt[i].tolist() == np.bincount(past[:prompt], minlength=vocab).tolist()
            assert in_output[i].tolist() == np.bincount(past[prompt:], minlength=vocab).tolist()


def test_history_refuses_tokens_it_cannot_count() -> None:
    """The history refuses a token beyond the vocabulary and changes nothing. It would count into other memory."""
    history = history_of([1, 2], vocab=4)
    for token in (4, -1):
        with pytest.raises(ProtocolError, match="vocabulary"):
            history.extend([3, token])
    assert len(history) == 2


# ---- log-probabilities


def test_logprobs_are_the_models_own() -> None:
    """Log-probabilities are the log-softmax of the raw logits, in fp32, best first."""
    logits = some_logits(3).astype(mx.bfloat16)
    expected = np.array(log_softmax(logits.astype(mx.float32)))
    found = logprobs(logits, [5, 6, 7], top=4)
    assert found.chosen.tolist() == [expected[i, t] for i, t in enumerate((5, 6, 7))]
    for i in range(3):
        best = np.sort(expected[i])[::-1][:4].tolist()
        assert row(found.top[i : i + 1]) == best
        assert [expected[i, t] for t in ints(found.top_tokens[i])] == best


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 101}, "temperature 101 is outside [0, 100]"),
        ({"temperature": math.inf}, "temperature inf is outside [0, 100]"),
        ({"top_p": 0.0}, "top_p 0 is outside (0, 1]"),
        ({"seed": 2**64}, "seed 18446744073709551616 is outside [0, 18446744073709551615]"),
        ({"logit_bias": {7: -1e9}}, "logit_bias[7] -1e+09 is outside [-100, 100]"),
    ],
)
def test_a_value_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    """An error about a value out of range has the field's name and the value, whole numbers in full."""
    with pytest.raises(RequestError) as raised:
        SamplingParams(**fields)
    assert str(raised.value) == message
    assert raised.value.param == next(iter(fields))


def test_equal_scores_list_the_lower_token_first() -> None:
    """Logits of half precision are often equal, and a sort may order them by the number of rows."""
    logits = mx.array([[0.0, 2.0, 1.0, 1.0, 2.0, 1.0], [1.0] * 6])
    assert logprobs(logits, [0, 0], 4).top_tokens.tolist() == [[1, 4, 2, 3], [0, 1, 2, 3]]


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


# ---- the ratio rule


P = mx.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -mx.inf])
Q = mx.array([0.0, 1.5, -0.5, 1.0, -mx.inf, -1.0, 0.5, 0.0])
DRAWS = 8_000


def shares(scores: mx.array) -> list[float]:
    return [float(share) for share in np.array(mx.softmax(scores))]


def ratio_draws(p: mx.array, q: mx.array | None, count: int = DRAWS, seed: int = 3) -> tuple[list[int], list[int]]:
    """Return drafts of `count` positions and the choices of the ratio rule. Without `q` the drafts are all token 1."""
    keys = key_array([(seed, position) for position in range(count)])
    drawn = draw(mx.broadcast_to(p, (count, p.size)), replace(PLAIN, seed=seed), lambda: keys)
    if q is None:
        drafts = [Draft(1)] * count
    else:
        rows = mx.broadcast_to(q, (count, q.size))
        tokens = mx.argmax(rows + gumbel_of(keys, q.size), axis=-1)
        drafts = [Draft(token, q[None]) for token in ints(tokens)]
    return [draft.token for draft in drafts], ints(ratio_choice(drawn, keys, drafts))


@pytest.mark.parametrize("q", [Q, P, None], ids=["another", "the same", "a match of the text"])
def test_the_ratio_rule_follows_the_target(q: mx.array | None) -> None:
    """Chi-square of 8,000 draws stays below 4 sigmas, and the share of accepted drafts is the largest possible.

    A distribution 5 % away in total variation would exceed the bound with probability > .99. The largest share is
    1 - TV(p, q), here within 4 standard errors.
    """
    drafts, chosen = ratio_draws(P, q)
    counts = Counter(chosen)
    assert sigmas(chi_square([counts[t] for t in range(8)], shares(P)), 6) < 4
    certain = [0.0, 1.0] + [0.0] * 6
    bound = sum(map(min, shares(P), certain if q is None else shares(q)))
    accepted = np.mean(np.array(drafts) == np.array(chosen))
    assert abs(accepted - bound) <= 4 * math.sqrt(bound * (1 - bound) / DRAWS) + 1e-6


def test_the_ratio_rule_never_takes_a_removed_token() -> None:
    """A draft that the target's filters remove is rejected, and one without any probability of its own too."""
    for q in (mx.array([-mx.inf] * 7 + [0.0]), mx.full((8,), -mx.inf), mx.full((8,), mx.nan)):
        drafts = [Draft(7, q[None])] * 500
        keys = key_array([(1, position) for position in range(500)])
        drawn = draw(mx.broadcast_to(P, (500, 8)), PLAIN, partial(mx.array, keys))
        counts = Counter(ints(ratio_choice(drawn, keys, drafts)))
        assert not counts[7]
        assert sigmas(chi_square([counts[t] for t in range(8)], shares(P)), 6) < 4


RATIO = {
    "plain": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.4, top_k=5, top_p=0.95, min_p=0.02),
    "xtc": SamplingParams(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.2),
    "penalized": SamplingParams(temperature=0.8, logit_bias={2: 1.0, 4: -1.0}),
}
TARGET = mx.random.normal((6, 6), key=mx.random.key(1)) * 1.5
HEAD = TARGET + mx.random.normal((6, 6), key=mx.random.key(2))


def ratio_text(params: SamplingParams, head: mx.array | None, depth: int, length: int) -> tuple[list[int], int]:
    """Return a text of the toy model, whose next token depends on the last one, and the number of accepted drafts.

    Without `head` the drafts are those of a match: token + 1. Every third window ends before the end of its chain.
    """
    tokens, accepted, step = [0], 0, 0
    while len(tokens) < length:
        step += 1
        window, drafts, first = [tokens[-1]], list[Draft](), len(tokens)
        for i in range(depth):
            if head is None:
                drafts.append(Draft((window[-1] + 1) % 6))
            else:
                drawn = draw(head[window[-1]][None], params, partial(key_array, [(params.seed, first + i)]))
                drafts.append(Draft(ints(drawn.tokens)[0], drawn.scores))
            window.append(drafts[-1].token)
        if step % 3 == 0:
            window.pop()
        targets = ints(choose(TARGET[mx.array(window)], params, first, drafts=drafts))
        count = accepted_length(window, targets)
        tokens += [*window[1:count], targets[count - 1]]
        accepted += count - 1
    return tokens, accepted


@pytest.mark.parametrize(
    ("name", "head"),
    [(name, HEAD) for name in RATIO] + [("filtered", None), ("filtered", mx.where(mx.arange(6) < 4, HEAD, -mx.inf))],
    ids=[*RATIO, "a match", "a part of the vocabulary"],
)
def test_a_text_of_the_ratio_rule_has_the_models_transitions(name: str, head: mx.array | None) -> None:
    """Each token of a text follows the one before with the model's probabilities, by chains of three drafts.

    The windows are accepted whole and in part. Chi-square over all transitions stays below 4 sigmas.
    """
    params = replace(RATIO[name], seed=21)
    tokens, accepted = ratio_text(params, head, depth=3, length=1500)
    assert 150 < accepted < 1300
    statistic, freedom = 0.0, 0
    for before in range(6):
        counts = Counter(b for a, b in pairwise(tokens) if a == before)
        expected = shares(filtered(TARGET[before][None], params, keys=key_array([(0, 0)]))[0])
        statistic += chi_square([counts[t] for t in range(6)], expected)
        freedom += sum(share > 0 for share in expected) - 1 if counts else 0
    assert sigmas(statistic, freedom) < 4


def test_the_ratio_rule_decides_a_row_alone_as_in_its_window() -> None:
    """A seed gives bit for bit the same choices for a window of four and for its rows one by one."""
    logits = some_logits(4)
    drafts = [Draft(i, some_logits(1, seed=i)) for i in range(3)]
    together = ints(choose(logits, PLAIN, 9, drafts=drafts))
    alone = [ints(choose(logits[i : i + 1], PLAIN, 9 + i, drafts=drafts[i : i + 1]))[0] for i in range(4)]
    assert together == alone
    assert together[3] == ints(choose(logits, PLAIN, 9))[3]
