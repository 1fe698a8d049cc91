"""The scores that a token is drawn from: logits after bias, penalties, temperature and filters.

The order is that of vLLM: logit bias; repetition, frequency, presence penalty; temperature; min-p, top-k, top-p.
mlx-lm divides by the temperature last, so its filters use other probabilities. XTC, which vLLM lacks, comes last, as in
mlx-lm for all filters but top-k. The order matters only for top-p, whose share refers to the remaining tokens.

Everything is fp32, lazy, and computed row by row. The scores of a row are bit-equal alone and in a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mtp.sampling.history import History, Tokens, token_array
from mtp.sampling.noise import Stream, uniform
from proto.errors import RequestError
from proto.params import SamplingParams

COLDEST = 1e-5
"""Lower bound of the temperature, as in vLLM: 1/T must stay finite in fp32."""


def adjusted(
    logits: mx.array,
    params: SamplingParams,
    history: History | None = None,
    pending: Tokens = (),
) -> mx.array:
    """Return the logits after bias and penalties, which greedy choice uses too: fp32 `[w, vocab]`.

    The past of row i consists of `history` and a part of `pending`, as in `History.counts`. Raises RequestError for a
    biased token outside the vocabulary, and ValueError for penalties without a history.
    """
    scores = logits.astype(mx.float32)
    if params.logit_bias:
        scores = _biased(scores, params.logit_bias)
    if params.penalized:
        if history is None:
            raise ValueError("penalties need the history of their sequence")
        scores = _penalized(scores, params, *history.counts(pending, rows=scores.shape[0]))
    return scores


def filtered(
    logits: mx.array,
    params: SamplingParams,
    first_position: int,
    history: History | None = None,
    pending: Tokens = (),
    exempt: Sequence[int] = (),
) -> mx.array:
    """Return the scores whose softmax is the distribution of the tokens: fp32 `[w, vocab]`.

    `logits` is `[w, vocab]` of any float type. Row i predicts position `first_position + i`. A removed token has the
    score -inf; each row keeps at least one token. XTC never removes the tokens of `exempt` and of `params.xtc_exempt`.
    The end of text should be among them, so that the model can stop. For greedy params use `choice.choose`.
    """
    scores = adjusted(logits, params, history, pending)
    scores = (scores - scores.max(axis=-1, keepdims=True)) / max(params.temperature, COLDEST)
    if params.min_p > 0:
        # The best token's score is 0, so these are ratios to its probability.
        scores = mx.where(scores < math.log(params.min_p), -mx.inf, scores)
    scores = _top(scores, params.top_k, params.top_p)
    if params.xtc_probability > 0:
        positions = range(first_position, first_position + scores.shape[0])
        draw = uniform(params.seed, positions, Stream.XTC)
        acts = (draw < params.xtc_probability)[:, None]
        exempt = (*exempt, *params.xtc_exempt)
        scores = mx.where(acts, _top_excluded(scores, params.xtc_threshold, exempt), scores)
    return scores


def _biased(scores: mx.array, bias: dict[int, float]) -> mx.array:
    vocab = scores.shape[-1]
    for token in bias:
        if not 0 <= token < vocab:
            raise RequestError(
                f"logit_bias token {token} exceeds the vocabulary of {vocab} tokens",
                param="logit_bias",
            )
    tokens = mx.array(list(bias), dtype=mx.int32)
    return scores.at[:, tokens].add(mx.array(list(bias.values()), dtype=mx.float32))


def _penalized(
    scores: mx.array, params: SamplingParams, in_prompt: mx.array, in_output: mx.array
) -> mx.array:
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        punished = mx.where(scores > 0, scores / penalty, scores * penalty)
        scores = mx.where(in_prompt + in_output > 0, punished, scores)
    scores = scores - params.frequency_penalty * in_output
    return scores - params.presence_penalty * (in_output > 0)


def _top(scores: mx.array, top_k: int, top_p: float) -> mx.array:
    """Keep the `top_k` best tokens, and of these the fewest best ones whose probability reaches `top_p`.

    Tokens that tie with the last one stay, so the result does not depend on the order of a sort.
    """
    vocab = scores.shape[-1]
    has_k = 0 < top_k < vocab
    if not has_k and top_p == 1.0:
        return scores
    best = mx.topk(scores, top_k, axis=-1) if has_k else scores  # only these need sorting
    if top_p == 1.0:
        return mx.where(scores < best.min(axis=-1, keepdims=True), -mx.inf, scores)
    best = mx.sort(best, axis=-1)
    better = mx.cumsum(mx.softmax(best, axis=-1), axis=-1, reverse=True, inclusive=False)
    dropped = (better >= top_p).sum(axis=-1, keepdims=True)
    return mx.where(scores < mx.take_along_axis(best, dropped, axis=-1), -mx.inf, scores)


def _top_excluded(scores: mx.array, threshold: float, exempt: Sequence[int]) -> mx.array:
    """Apply XTC: remove the tokens above `threshold`, except the least likely of them."""
    probability = mx.softmax(scores, axis=-1)
    above = mx.where(probability > threshold, probability, mx.inf)
    removed = probability > above.min(axis=-1, keepdims=True)
    if exempt:
        removed[:, token_array(exempt)] = False
    return mx.where(removed, -mx.inf, scores)
