"""The token at a position: `argmax(scores + gumbel(seed, position))`, or `argmax(logits)` when greedy (DESIGN §6).

Adding Gumbel noise to log-probabilities and taking the largest is drawing from them. The noise depends on the
position alone, so the same logits give the same token whatever the window, the batch or the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mtp.sampling.filters import adjusted, filtered
from mtp.sampling.history import History, Tokens, token_array
from mtp.sampling.noise import Stream, gumbel
from proto.params import SamplingParams


def choose(
    logits: mx.array,
    params: SamplingParams,
    first_position: int,
    history: History | None = None,
    pending: Tokens = (),
    exempt: Sequence[int] = (),
) -> mx.array:
    """Tokens for the rows of `logits` `[w, vocab]`: int32 `[w]`, lazy.

    Row i predicts position `first_position + i`; `history`, `pending` and `exempt` are as `filters.filtered` says.
    Greedy takes bias and penalties, and no filter: none but XTC could change the best token, and XTC is
    a way to draw (mlx-lm's reading too).
    """
    if params.greedy:
        scores = adjusted(logits, params, history, pending)
        return mx.argmax(scores, axis=-1).astype(mx.int32)
    scores = filtered(logits, params, first_position, history, pending, exempt)
    return drawn(scores, params.seed, first_position)


def drawn(
    scores: mx.array, seed: int, first_position: int, stream: Stream = Stream.TARGET
) -> mx.array:
    """Draw from the softmax of each row of `scores` `[w, vocab]`: int32 `[w]`, lazy."""
    rows, vocab = scores.shape
    positions = range(first_position, first_position + rows)
    noise = gumbel(seed, positions, vocab, stream)
    return mx.argmax(scores + noise, axis=-1).astype(mx.int32)


class Logprobs(NamedTuple):
    """Log-probabilities of `w` tokens and, most likely first, of the `top` best tokens at their positions."""

    chosen: mx.array
    """fp32 `[w]`"""
    top_tokens: mx.array
    """int32 `[w, top]`"""
    top: mx.array
    """fp32 `[w, top]`"""


def logprobs(logits: mx.array, tokens: Tokens, top: int) -> Logprobs:
    """What the model itself thought of `tokens` `[w]`: log-softmax of `logits` `[w, vocab]`, before bias, penalties,
    temperature and filters (vLLM's default)."""
    scores = logits.astype(mx.float32)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, token_array(tokens)[:, None], axis=-1)[:, 0]
    top = min(top, scores.shape[-1])
    best = mx.argpartition(scores, kth=-max(top, 1), axis=-1)[:, scores.shape[-1] - top :]
    best_scores = mx.take_along_axis(scores, best, axis=-1)
    order = mx.argsort(-best_scores, axis=-1)
    return Logprobs(
        chosen,
        mx.take_along_axis(best, order, axis=-1).astype(mx.int32),
        mx.take_along_axis(best_scores, order, axis=-1),
    )
