"""The acceptance of the drafts of a window.

A window is `[confirmed, draft_1 … draft_k]`. Row i of its logits predicts the token after its i-th token, `target_i`.
The target is the token of the sequence at this place. Under both rules for the targets:

    accepted length = 1 + the number of leading drafts with draft_(i+1) = target_i
    next token      = target_(accepted length - 1)

Under the coupled rule (the default), target_i is `choice.choose` of row i, which is the token of plain decoding. The
drafter draws with the same noise from its own logits, so it often draws the same token. The answer equals, token for
token, that of plain sampling with the same seed.

Under the ratio rule, draft_(i+1) is drawn from the head's distribution q with noise of its own. With the target's
distribution p:

    target_i = draft_(i+1)               with probability min(1, p(draft)/q(draft)),
               a draw from (p - q)+      otherwise,

Where there is no draft, the target is a draw from p. Each target is distributed as p (Leviathan et al. 2023, Chen et
al. 2023), but the token depends on the draft. So the distribution is that of plain sampling, and the tokens are not.
The rule accepts more drafts: it reaches 1 - TV(p, q), the bound of any coupling. Greedy p and q have one token each, so
the rule is then the coupled one: use `choice.choose` for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtp.sampling.choice import drawn
from mtp.sampling.filters import Stream, Tokens, gumbel, token_array, uniform


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


def ratio_targets(
    target_scores: mx.array,
    draft_scores: mx.array,
    drafts: Tokens,
    seed: int,
    first_position: int,
) -> mx.array:
    """Return the targets of a window's rows under the ratio rule: int32 `[w]`, lazy, for `accepted_length`.

    `target_scores` `[w, vocab]` and `draft_scores` `[k, vocab]` are the target's and the head's `filters.filtered`
    logits. Row i belongs to position `first_position + i`, the position of `drafts[i]`, which was drawn with
    `Stream.DRAFT`. k is w - 1, or w when the next window begins with a draft too. Targets after the first one that
    differs from its draft have no meaning. Raises ValueError for another number of drafts.
    """
    rows, vocab = target_scores.shape
    count = draft_scores.shape[0]
    if count not in (rows - 1, rows):
        raise ValueError(f"{count} drafts for {rows} rows. Give {rows - 1} or {rows}.")
    free = drawn(target_scores[count:], seed, first_position + count) if count < rows else None
    if count == 0 and free is not None:
        return free
    tokens = token_array(drafts)
    positions = range(first_position, first_position + count)
    p = mx.softmax(target_scores[:count], axis=-1)
    q = mx.softmax(draft_scores, axis=-1)
    p_draft = mx.take_along_axis(p, tokens[:, None], axis=-1)[:, 0]
    q_draft = mx.take_along_axis(q, tokens[:, None], axis=-1)[:, 0]
    accepted = uniform(seed, positions, Stream.COIN) * q_draft < p_draft
    noise = gumbel(seed, positions, vocab, Stream.RESIDUAL)
    replacement = mx.argmax(mx.log(residual(p, q)) + noise, axis=-1).astype(mx.int32)
    targets = mx.where(accepted, tokens, replacement)
    return targets if free is None else mx.concatenate([targets, free])


def residual(p: mx.array, q: mx.array) -> mx.array:
    """Return the unnormalized excess of p over q: `(p - q)+`, `[k, vocab]`.

    Returns p for rows in which p and q are equal up to rounding.
    """
    more = mx.maximum(p - q, 0)
    return mx.where(mx.any(more > 0, axis=-1, keepdims=True), more, p)
