"""Drafting with the MTP head: keep its cache in step with the text, and chain drafts from the last token.

The head's cache holds one entry for each pair (hidden[t], token[t+1]), position 0 first, where hidden is the
backbone's after its final norm. A pair is known once token[t+1] is; so a sequence of n tokens with its successor
chosen has n entries. A draft chain appends entries computed from the head's own outputs and takes them away again: what
stays was computed from the backbone's hidden states, or the head would drift from what it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from mtp.head.attention import KV, KVFormat, copy_of, state_of
from mtp.head.mtp_head import MTPHead
from mtp.sampling.choice import choose, drawn
from mtp.sampling.filters import filtered
from mtp.sampling.grammar import GrammarState
from mtp.sampling.history import History
from mtp.sampling.noise import Stream
from proto.params import SamplingParams

MOST_WAITING = 64
"""Pairs kept back while nobody wants drafts; then one pass takes them all, which costs the head's weights once."""


@dataclass
class HeadState:
    """One sequence's head: the cache, and the pairs it has not been fed yet.

    `newest [1, hidden]` is the newest hidden state. Its pair is among the known ones if its `successor` is known.
    """

    cache: KV
    newest: mx.array | None = None
    successor: int | None = None
    waiting_hidden: list[mx.array] = field(default_factory=list)
    waiting_tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Pairs known so far: equal to the sequence's tokens whose successor is known."""
        return int(self.cache.offset) + len(self.waiting_tokens)

    def observe(self, hidden: mx.array, tokens: Sequence[int], successor: int | None) -> None:
        """Take the verified `hidden [n, hidden]` of the next `n` tokens, and the token after them if it is known."""
        if self.newest is not None and self.successor != tokens[0]:
            self._forget_successor()
            self._wait(self.newest, tokens[:1])
        following = [*tokens[1:], *([] if successor is None else [successor])]
        self._wait(hidden[: len(following)], following)
        self.newest, self.successor = mx.contiguous(hidden[-1:]), successor

    def _wait(self, hidden: mx.array, following: Sequence[int]) -> None:
        if following:
            # Contiguous: a view would keep a whole frame's hidden states alive for a few rows of it.
            self.waiting_hidden.append(mx.contiguous(hidden))
            self.waiting_tokens.extend(following)

    def _forget_successor(self) -> None:
        """Take back the newest pair: the text goes on otherwise, as after a prefix that another request continues."""
        if self.successor is None:
            return
        if not self.waiting_tokens:
            self.cache.trim(1)
            return
        self.waiting_tokens.pop()
        last = self.waiting_hidden.pop()
        if last.shape[0] > 1:
            self.waiting_hidden.append(last[:-1])

    def copy(self) -> HeadState:
        return HeadState(
            copy_of(self.cache),
            self.newest,
            self.successor,
            list(self.waiting_hidden),
            list(self.waiting_tokens),
        )

    def arrays(self) -> list[mx.array]:
        newest = [] if self.newest is None else [self.newest]
        return [*state_of(self.cache), *self.waiting_hidden, *newest]


@dataclass(frozen=True)
class DraftJob:
    """Wants `depth` drafts to follow `token`, which stands at `position` and is not in `history` yet.

    With a `grammar`, `answer` are the tokens of the answer up to `token`, and every draft is a token that it allows.
    """

    state: HeadState
    depth: int
    token: int
    position: int
    params: SamplingParams
    history: History | None = None
    grammar: GrammarState | None = None
    answer: Sequence[int] = ()

    @property
    def ratio(self) -> bool:
        """Whether drafts are drawn with noise of their own, and their scores kept for the ratio rule."""
        return self.params.ratio


@dataclass(frozen=True)
class Drafts:
    """Drafted tokens and, under the ratio rule, the scores `[depth, vocab]` they were drawn from."""

    tokens: tuple[int, ...]
    scores: mx.array | None = None


class Drafter:
    """The head with the embedding and the output projection it shares with the backbone."""

    def __init__(
        self,
        head: MTPHead,
        embed: Callable[[mx.array], mx.array],
        unembed: Callable[[mx.array], mx.array],
        kv_format: KVFormat,
        exempt: Sequence[int] = (),
    ) -> None:
        self.head = head
        self.embed = embed
        self.unembed = unembed
        self.kv_format = kv_format
        self.exempt = tuple(exempt)
        """Tokens that XTC never removes, as for the target."""

    def new_state(self) -> HeadState:
        return HeadState(self.kv_format.new_cache())

    def catch_up(self, states: Sequence[HeadState]) -> mx.array:
        """Feed every state its waiting pairs, in one pass. Returns each one's last output: `[len(states), hidden]`.

        Every state must have at least one pair waiting.
        """
        tokens = mx.array([t for s in states for t in s.waiting_tokens], mx.uint32)
        hidden = mx.concatenate([h for s in states for h in s.waiting_hidden])
        widths = [len(s.waiting_tokens) for s in states]
        out = self.head.advance(self.embed(tokens), hidden, [s.cache for s in states], widths)
        for state in states:
            state.waiting_hidden.clear()
            state.waiting_tokens.clear()
        ends = [sum(widths[: i + 1]) - 1 for i in range(len(widths))]
        return out if len(ends) == out.shape[0] else out[mx.array(ends)]

    def relieve(self, states: Sequence[HeadState]) -> None:
        """Feed the states that have kept back too many pairs. What the others keep lets go of the frame it came in."""
        full = [s for s in states if len(s.waiting_tokens) >= MOST_WAITING]
        if full:
            self.catch_up(full)
        mx.async_eval([s.arrays() for s in states])

    def draft(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        """Chain `depth` drafts for every job, all jobs in one pass a position.

        Step i feeds the head its own output and the token drafted from it. Evaluates; leaves every cache with its
        true pairs only.
        """
        hidden = self.catch_up([job.state for job in jobs])
        chains = [_Chain(job, self.exempt) for job in jobs]
        active = chains
        for step in range(max(job.depth for job in jobs)):
            if step > 0:
                rows = [i for i, chain in enumerate(active) if chain.job.depth > step]
                active = [active[i] for i in rows]
                hidden = hidden if len(rows) == hidden.shape[0] else hidden[mx.array(rows)]
                tokens = mx.concatenate([chain.tokens[-1] for chain in active])
                caches = [chain.job.state.cache for chain in active]
                hidden = self.head.advance(self.embed(tokens), hidden, caches, [1] * len(active))
            logits = self.unembed(hidden)
            for row, chain in enumerate(active):
                chain.draw(logits[row : row + 1])
        mx.eval([(chain.tokens, chain.scores, chain.job.state.arrays()) for chain in chains])
        return [chain.end() for chain in chains]


class _Chain:
    """The drafts of one job as they are drawn, `[1]` and lazy each."""

    def __init__(self, job: DraftJob, exempt: tuple[int, ...]) -> None:
        self.exempt = exempt
        self.job = job
        self.tokens: list[mx.array] = []
        self.scores: list[mx.array] = []

    def draw(self, logits: mx.array) -> None:
        """Draw the next draft from `logits [1, vocab]`."""
        job = self.job
        position = job.position + 1 + len(self.tokens)
        pending = mx.concatenate([mx.array([job.token], mx.int32), *self.tokens])
        if job.grammar is not None:
            drafted = cast(list[int], pending[1:].tolist())
            logits = job.grammar.mask(logits, [*job.answer, *drafted])
        if job.ratio:
            scores = filtered(logits, job.params, position, job.history, pending, self.exempt)
            self.scores.append(scores)
            self.tokens.append(drawn(scores, job.params.seed, position, Stream.DRAFT))
        else:
            self.tokens.append(
                choose(logits, job.params, position, job.history, pending, self.exempt)
            )

    def end(self) -> Drafts:
        """The evaluated drafts. What the chain left in the head's cache goes."""
        if self.job.depth > 1:
            self.job.state.cache.trim(self.job.depth - 1)
        scores = mx.concatenate(self.scores) if self.scores else None
        return Drafts(tuple(cast(int, t.item()) for t in self.tokens), scores)
