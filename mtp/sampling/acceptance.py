"""How many tokens of a window are right.

A window is `[confirmed, draft_1 … draft_k]`; row i of its logits predicts the token after its i-th, `target_i`.
The target is what the sequence says there. So, whichever rule chose the targets:

    kept = 1 + the number of leading drafts with draft_(i+1) = target_i, and target_(kept-1) comes next.

coupled (the default): target_i is `sampling.choose` of row i, what plain decoding would have said there. The drafter
draws with the same noise from its own logits, so it often lands on the same token. The answer is that of plain
sampling with the same seed, token for token.

ratio: draft_(i+1) was drawn from the head's distribution q with noise of its own. With the target's distribution p,

    target_i = draft_(i+1)               with probability min(1, p(draft)/q(draft)),
               a draw from (p - q)+      otherwise,

and a draw from p where there is no draft. Each is distributed as p (Leviathan et al. 2023, Chen et al. 2023), but
which of its tokens comes out depends on the draft: the distribution is that of plain sampling, the tokens are not.
More drafts are kept (at most 1 - TV(p, q), the bound of any coupling, is reached). Greedy p and q have one token
each, and the rule becomes the coupled one: use `sampling.choose` for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtp.sampling.choice import drawn
from mtp.sampling.history import Tokens, token_array
from mtp.sampling.noise import Stream, gumbel, uniform


def accepted_length(
    window: Sequence[int], targets: Sequence[int], expected: int | None = None
) -> int:
    """How many tokens of `window` are right, given `targets`, one for each of its rows.

    `expected` is the target for the window's first token when the window was sent on the hope that the one
    before it would be kept whole; None when that token is confirmed. 0 means the hope was wrong.
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
    """Targets of a window's rows under the ratio rule: int32 `[w]`, lazy, for `accepted_length`.

    `target_scores` `[w, vocab]` and `draft_scores` `[k, vocab]` are the target's and the head's `filters.filtered`
    logits; row i is of position `first_position + i`, where `drafts[i]` stands, drawn with `Stream.DRAFT`. k is w - 1,
    or w when the window after this one begins with a draft too. Targets after the first that differs from
    its draft mean nothing.
    """
    rows, vocab = target_scores.shape
    count = draft_scores.shape[0]
    if count not in (rows - 1, rows):
        raise ValueError(f"{count} drafts for {rows} rows: one fewer than rows, or as many")
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
    """What p has more of than q, unnormalized: `(p - q)+`, `[k, vocab]`.

    Where rounding leaves nothing, p and q are the same, and p itself is returned.
    """
    more = mx.maximum(p - q, 0)
    return mx.where(mx.any(more > 0, axis=-1, keepdims=True), more, p)
