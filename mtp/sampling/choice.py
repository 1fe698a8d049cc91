"""The choice of a token from logits and noise, and the acceptance of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mtp.sampling import filters
from proto.params import SamplingParams


def choose(
    logits: mx.array,
    params: SamplingParams,
    first_position: int,
    history: filters.History | None = None,
    pending: filters.Tokens = (),
    exempt: Sequence[int] = (),
) -> mx.array:
    """Return the tokens for the rows of `logits` `[w, vocab]`: int32 `[w]`, lazy.

    Row i predicts position `first_position + i`. `history`, `pending` and `exempt` are those of `filters.filtered`.
    Greedy choice applies bias and penalties, but no filter. Only XTC could change the best token, and XTC belongs to
    random draws, as in mlx-lm.
    """
    if params.greedy:
        scores = filters.adjusted(logits, params, history, pending)
        return mx.argmax(scores, axis=-1).astype(mx.int32)
    scores = filters.filtered(logits, params, first_position, history, pending, exempt)
    rows, vocab = scores.shape
    noise = filters.gumbel(
        params.seed, range(first_position, first_position + rows), vocab, filters.Stream.TARGET
    )
    return mx.argmax(scores + noise, axis=-1).astype(mx.int32)


def shared_settings(params: SamplingParams) -> tuple[float, ...] | None:
    """Return what `choose_rows` depends on, equal for requests whose rows it may take together.

    None if a row also depends on its sequence: on the history, a bias, or XTC.
    """
    if params.penalized or params.logit_bias or params.xtc_probability > 0:
        return None
    return () if params.greedy else (params.temperature, params.top_k, params.top_p, params.min_p)


def choose_rows(
    logits: mx.array, params: SamplingParams, places: Sequence[tuple[int, int]]
) -> mx.array:
    """Return the tokens for rows of several sequences with equal `shared_settings`: int32 `[rows]`, lazy.

    Row i has the seed and the position of `places[i]`, and gets the token that `choose` gives it.
    """
    return choose_with_keys(
        logits, params, lambda: filters.key_array(places, filters.Stream.TARGET)
    )


def choose_with_keys(
    logits: mx.array, params: SamplingParams, keys: Callable[[], mx.array]
) -> mx.array:
    """Return the tokens of `choose_rows` for rows whose noise has `keys()`, perhaps lazy. Greedy rows need none."""
    if params.greedy:
        return mx.argmax(logits.astype(mx.float32), axis=-1).astype(mx.int32)
    scores = filters.filtered(logits, params, 0)
    return mx.argmax(scores + filters.gumbel_of(keys(), scores.shape[-1]), axis=-1).astype(mx.int32)


class Logprobs(NamedTuple):
    """The log-probabilities of `w` tokens, and of the `top` best tokens at their positions, most likely first."""

    chosen: mx.array
    """fp32 `[w]`"""
    top_tokens: mx.array
    """int32 `[w, top]`"""
    top: mx.array
    """fp32 `[w, top]`"""


def logprobs(logits: mx.array, tokens: filters.Tokens, top: int) -> Logprobs:
    """Return the model's own log-probabilities of `tokens` `[w]` and of the `top` best tokens.

    They are the log-softmax of `logits` `[w, vocab]`, before bias, penalties, temperature and filters, as in vLLM.
    """
    scores = logits.astype(mx.float32)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, filters.token_array(tokens)[:, None], axis=-1)[:, 0]
    top_tokens, best = _likeliest(scores, min(top, scores.shape[-1]))
    return Logprobs(chosen, top_tokens, best)


def _likeliest(scores: mx.array, top: int) -> tuple[mx.array, mx.array]:
    """Return the tokens `[w, top]` of the best scores and these scores, the lower token first where scores are equal.

    Half-precision logits are often equal. A sort of a GPU orders equal values by the number of rows.
    """
    tokens: list[mx.array] = []
    found: list[mx.array] = []
    vocab = mx.arange(scores.shape[-1])
    for _ in range(top):
        best = mx.argmax(scores, axis=-1, keepdims=True)
        tokens.append(best.astype(mx.int32))
        found.append(mx.take_along_axis(scores, best, axis=-1))
        scores = mx.where(vocab == best, -mx.inf, scores)
    if not tokens:
        nothing = (scores.shape[0], 0)
        return mx.zeros(nothing, mx.int32), mx.zeros(nothing)
    return mx.concatenate(tokens, axis=-1), mx.concatenate(found, axis=-1)


def accepted_length(
    window: Sequence[int], targets: Sequence[int], expected: int | None = None
) -> int:
    """Return the number of accepted tokens of `window`, given `targets`, one for each of its rows.

    For a speculative window, `expected` is the target for its first token; None when this token is confirmed. Returns 0
    for a misspeculation.
    """
    if expected is not None and window[0] != expected:
        return 0
    count = 1
    while count < len(window) and window[count] == targets[count - 1]:
        count += 1
    return count
