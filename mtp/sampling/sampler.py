"""The choice of a token from logits: noise, filters, penalties with their history, and the acceptance of drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from proto.errors import ProtocolError, RequestError
from proto.params import SamplingParams


class Drawn(NamedTuple):
    """The tokens drawn for `w` rows, int32 `[w]`, and the scores whose softmax they follow, fp32 `[w, vocab]`."""

    tokens: mx.array
    scores: mx.array


class Draft(NamedTuple):
    """A drafted token and the scores that it was drawn from, fp32 `[1, vocab]`; None if it was not drawn at random."""

    token: int
    scores: mx.array | None = None


def draw(
    logits: mx.array,
    params: SamplingParams,
    keys: Callable[[], mx.array],
    history: History | None = None,
    pending: Tokens = (),
) -> Drawn:
    """Draw a token for each row of `logits` `[w, vocab]`, lazily.

    The noise of row i has `keys()[i]`, perhaps lazy. Greedy rows need no keys, and no filter changes their choice.
    `history` and `pending` are those of `adjusted`.
    """
    if params.greedy:
        scores = adjusted(logits, params, history, pending)
        return Drawn(mx.argmax(scores, axis=-1).astype(mx.int32), scores)
    found = keys()
    scores = filtered(logits, params, history, pending, found)
    return Drawn(mx.argmax(scores + gumbel_of(found, scores.shape[-1]), axis=-1).astype(mx.int32), scores)


def choose(
    logits: mx.array,
    params: SamplingParams,
    first_position: int,
    history: History | None = None,
    pending: Tokens = (),
    drafts: Sequence[Draft] = (),
) -> mx.array:
    """Return the tokens for the rows of `logits` `[w, vocab]`: int32 `[w]`, lazy.

    Row i predicts position `first_position + i`. `history` and `pending` are those of `adjusted`. The first rows decide
    about `drafts` by the ratio rule.
    """
    keys = key_array([(params.seed, first_position + i) for i in range(logits.shape[0])])
    drawn = draw(logits, params, lambda: keys, history, pending)
    return ratio_choice(drawn, keys, drafts) if drafts else drawn.tokens


def ratio_choice(drawn: Drawn, keys: mx.array, drafts: Sequence[Draft]) -> mx.array:
    """Return the tokens `[w]` of `drawn`, the first ones replaced by those of the ratio rule about `drafts`.

    A draft that was drawn from q is accepted with probability min(1, p/q), otherwise the token is drawn from the excess
    of p over q. So it follows p, the softmax of its row, if the draft does not depend on the noise of these two
    decisions. A draft that was not drawn has a q of 1.
    """
    count, vocab = len(drafts), drawn.scores.shape[-1]
    tokens = mx.array([draft.token for draft in drafts], mx.int32)
    certain = (mx.arange(vocab) == tokens[:, None]).astype(mx.float32)
    rows = [
        c if d.scores is None else mx.softmax(d.scores, axis=-1) for c, d in zip(certain[:, None], drafts, strict=True)
    ]
    q = mx.concatenate(rows)
    q = mx.where(mx.isnan(q), certain, q)  # of a draft from scores that a grammar has all removed
    p = mx.softmax(drawn.scores[:count], axis=-1)
    of_draft = [mx.take_along_axis(share, tokens[:, None], axis=-1)[:, 0] for share in (p, q)]
    accepted = _uniform(keys[:count] ^ _ACCEPTS) * of_draft[1] < of_draft[0]
    excess = mx.maximum(p - q, 0)
    excess = mx.where(mx.any(excess > 0, axis=-1, keepdims=True), excess, p)  # p and q may be equal up to rounding
    noise = gumbel_of(keys[:count] ^ _REPLACES, vocab)
    replaced = mx.argmax(mx.log(excess) + noise, axis=-1).astype(mx.int32)
    return mx.concatenate([mx.where(accepted, tokens, replaced), drawn.tokens[count:]])


def shared_settings(params: SamplingParams) -> tuple[Any, ...] | None:
    """Return what `choose_with_keys` depends on, equal for requests whose rows it may take together.

    None if a row also depends on its sequence: on the history or a bias.
    """
    if params.penalized or params.logit_bias:
        return None
    xtc = params.xtc_probability, params.xtc_threshold, params.xtc_exempt
    return () if params.greedy else (params.temperature, params.top_k, params.top_p, params.min_p, *xtc)


def choose_with_keys(logits: mx.array, params: SamplingParams, keys: Callable[[], mx.array]) -> mx.array:
    """Return the tokens for rows of several sequences with equal `shared_settings`: int32 `[rows]`, lazy.

    The noise of row i has `keys()[i]`, and is that of `choose`.
    """
    return draw(logits, params, keys).tokens


class Logprobs(NamedTuple):
    """The log-probabilities of `w` tokens, and of the `top` best tokens at their positions, most likely first."""

    chosen: mx.array
    """fp32 `[w]`"""
    top_tokens: mx.array
    """int32 `[w, top]`"""
    top: mx.array
    """fp32 `[w, top]`"""


def logprobs(logits: mx.array, tokens: Tokens, top: int) -> Logprobs:
    """Return the model's own log-probabilities of `tokens` `[w]` and of the `top` best tokens.

    They are the log-softmax of `logits` `[w, vocab]`, before bias, penalties, temperature and filters, as in vLLM.
    """
    scores = logits.astype(mx.float32)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, token_array(tokens)[:, None], axis=-1)[:, 0]
    top_tokens, best = _likeliest(scores, min(top, scores.shape[-1]))
    return Logprobs(chosen, top_tokens, best)


def _likeliest(scores: mx.array, top: int) -> tuple[mx.array, mx.array]:
    """Return the tokens `[w, top]` of the best scores and these scores, the lower token first where scores are equal.

    Half-precision logits are often equal, and a GPU's sort orders equal values by the number of rows.
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


def accepted_length(window: Sequence[int], targets: Sequence[int], expected: int | None = None) -> int:
    """Return the number of accepted tokens of `window`, given `targets`, one for each of its rows.

    For a speculative window, `expected` is the target for its first token. Returns 0 if they differ.
    """
    if expected is not None and window[0] != expected:
        return 0
    count = 1
    while count < len(window) and window[count] == targets[count - 1]:
        count += 1
    return count


MASK_64 = 2**64 - 1

SMALLEST_UNIFORM = 2.0**-33
"""Half of the finest step of a uniform number of 32 bits. It replaces 0, whose logarithm is not finite."""


POSITION_STEP = 8
"""Words from one position to the next. It never changes, since answers depend on the keys."""


def key(seed: int, position: int) -> tuple[int, int]:
    """Return the key of the noise at a position: the high and low 32 bits of a word, as mx.random takes them.

    It has two rounds of splitmix64's finalizer, a bijection, so two positions below 2^61 never share a key under one
    seed. Because of the first round, seed + 1 does not give the noise of this seed shifted by a position.
    """
    mixed = splitmix64(splitmix64(seed) ^ (POSITION_STEP * position))
    return mixed >> 32, mixed & 0xFFFFFFFF


_XTC, _ACCEPTS, _REPLACES = (mx.array([0, n], mx.uint32) for n in (1, 2, 3))
"""Differences from the key of a position to those of its other draws. They never change either."""


def gumbel(seed: int, positions: Sequence[int], vocab: int) -> mx.array:
    """Return standard Gumbel noise for each token at each position: fp32 `[len(positions), vocab]`, lazy.

    The formula is `-log(-log1p(-u))`. Its large values come from u near 0, where fp32 is precise: steps of 2^-24 near 1
    would limit the noise to 16.6. Row i has the same bits as its position alone.
    """
    return gumbel_of(key_array([(seed, position) for position in positions]), vocab)


def key_array(places: Sequence[tuple[int, int]]) -> mx.array:
    """Return the key of each (seed, position) of `places`: uint32 `[len(places), 2]`."""
    return mx.array([key(*place) for place in places], dtype=mx.uint32)


def gumbel_of(keys: mx.array, vocab: int) -> mx.array:
    """Return the noise of `gumbel` for each of `keys`, which may be lazy: fp32 `[len(keys), vocab]`, lazy."""
    u = mx.vmap(lambda k: mx.random.uniform(shape=(vocab,), key=k))(keys)
    return -mx.log(-mx.log1p(-mx.maximum(u, SMALLEST_UNIFORM)))


def _uniform(keys: mx.array) -> mx.array:
    """Return one number in [0, 1) for each of `keys`: fp32 `[len(keys)]`, lazy."""
    return mx.vmap(lambda k: mx.random.uniform(key=k))(keys)


def splitmix64(x: int) -> int:
    """Return one output of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


Tokens = Sequence[int] | mx.array
"""Token ids. An array of them may be lazy."""


class History:
    """The token counts of one sequence, separate for prompt and output: two int32 `[vocab]` arrays.

    Construct one only for a sequence whose params are `penalized`. The first `prompt` tokens (`Admit.prompt`) are the
    user's, also in a rebuilt sequence whose output is part of its new prompt.
    """

    def __init__(self, vocab: int, prompt: int) -> None:
        self.vocab = vocab
        self.prompt = prompt
        self._count = 0
        self._in_prompt = mx.zeros([vocab], dtype=mx.int32)
        self._in_output = mx.zeros([vocab], dtype=mx.int32)

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises ProtocolError for one outside the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab:
                raise ProtocolError(f"token {token} exceeds the vocabulary of {self.vocab} tokens")
        split = max(0, self.prompt - len(self))
        self._in_prompt = _added(self._in_prompt, tokens[:split])
        self._in_output = _added(self._in_output, tokens[split:])
        self._count += len(tokens)

    def counts(self, pending: Tokens, rows: int) -> tuple[mx.array, mx.array]:
        """Return the token counts in the past of each row: (in the prompt, in the output), int32 `[rows, vocab]`.

        `pending` are n >= rows - 1 tokens after the history: an open window or a chain of drafts. The past of the last
        row includes all of them, and that of each row before it one fewer.
        """
        tokens = token_array(pending)
        unseen = rows - 1
        assert tokens.size >= unseen, f"{rows} rows need {unseen} pending tokens"
        pairs = [(r, j) for r in range(rows) for j in range(tokens.size - unseen + r)]
        first_output = self.prompt - len(self)
        return (
            _scattered(self._in_prompt, rows, tokens, [p for p in pairs if p[1] < first_output]),
            _scattered(self._in_output, rows, tokens, [p for p in pairs if p[1] >= first_output]),
        )


def token_array(tokens: Tokens) -> mx.array:
    """Return `tokens` as int32 `[n]`."""
    return mx.array(tokens if isinstance(tokens, mx.array) else list(tokens), dtype=mx.int32)


def _added(counts: mx.array, tokens: Sequence[int]) -> mx.array:
    return counts.at[token_array(tokens)].add(1) if tokens else counts


def _scattered(counts: mx.array, rows: int, tokens: mx.array, pairs: list[tuple[int, int]]) -> mx.array:
    """Repeat `counts` for each row, and add one for `tokens[j]` in row r for each pair (r, j)."""
    repeated = mx.broadcast_to(counts, (rows, counts.size))
    if not pairs:
        return repeated
    row, index = mx.array(pairs, dtype=mx.int32).T
    return repeated.at[row, tokens[index]].add(1)


COLDEST = 1e-5
"""Lower bound of the temperature, as in vLLM: 1/T must stay finite in fp32."""


def adjusted(
    logits: mx.array, params: SamplingParams, history: History | None = None, pending: Tokens = ()
) -> mx.array:
    """Return the logits after bias and penalties, which greedy choice uses too: fp32 `[w, vocab]`.

    The past of row i consists of `history` and a part of `pending`, as in `History.counts`. Raises RequestError for a
    biased token outside the vocabulary.
    """
    scores = logits.astype(mx.float32)
    if params.logit_bias:
        scores = _biased(scores, params.logit_bias)
    if params.penalized:
        assert history is not None, "penalties need the history of their sequence"
        scores = _penalized(scores, params, *history.counts(pending, rows=scores.shape[0]))
    return scores


def filtered(
    logits: mx.array,
    params: SamplingParams,
    history: History | None = None,
    pending: Tokens = (),
    keys: mx.array | None = None,
) -> mx.array:
    """Return the scores whose softmax is the distribution of the tokens: fp32 `[w, vocab]`, -inf for a removed token.

    `logits` is `[w, vocab]` of any float type. Each row keeps at least one token. XTC needs the `keys` of the rows,
    uint32 `[w, 2]`. For greedy params use `choose`.
    """
    scores = adjusted(logits, params, history, pending)
    scores = (scores - scores.max(axis=-1, keepdims=True)) / max(params.temperature, COLDEST)
    if params.min_p > 0:
        # The best token's score is 0, so these are ratios to its probability.
        scores = mx.where(scores < math.log(params.min_p), -mx.inf, scores)
    scores = _top(scores, params.top_k, params.top_p)
    if params.xtc_probability > 0:
        assert keys is not None, "XTC needs the keys of its positions"
        acts = _uniform(keys ^ _XTC) < params.xtc_probability
        removed = _removed_by_xtc(scores, params.xtc_threshold, params.xtc_exempt)
        scores = mx.where(acts[:, None] & removed, -mx.inf, scores)
    return scores


def _removed_by_xtc(scores: mx.array, threshold: float, exempt: Sequence[int]) -> mx.array:
    """Return the tokens above `threshold` except the least likely of them and `exempt`: bool `[w, vocab]`."""
    shares = mx.softmax(scores, axis=-1)
    least = mx.where(shares > threshold, shares, mx.inf).min(axis=-1, keepdims=True)
    known = mx.array([token for token in exempt if token < shares.shape[-1]], mx.int32)
    kept = mx.zeros(shares.shape[-1], mx.bool_).at[known].add(True) if known.size else mx.array(False)
    return (shares > least) & ~kept


def _biased(scores: mx.array, bias: dict[int, float]) -> mx.array:
    vocab = scores.shape[-1]
    for token in bias:
        if not 0 <= token < vocab:
            raise RequestError(f"logit_bias token {token} exceeds the vocabulary of {vocab} tokens", param="logit_bias")
    tokens = mx.array(list(bias), dtype=mx.int32)
    return scores.at[:, tokens].add(mx.array(list(bias.values()), dtype=mx.float32))


def _penalized(scores: mx.array, params: SamplingParams, in_prompt: mx.array, in_output: mx.array) -> mx.array:
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
