"""The MTP head and its drafter, which updates the cache of the head and chains drafts from the last token.

The cache has one entry for each pair (hidden[t], token[t+1]), where `hidden` is the backbone's state after its final
norm. So a sequence of n tokens with a chosen successor has n entries. A chain of drafts appends entries from the head's
own outputs and removes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from mtp.layers.kv_cache import KVRows
from mtp.layers.layer import Hole, KVFormat, Layer
from mtp.layers.reference.attention import AttentionLayer
from mtp.sampling.constraint import Constraint
from mtp.sampling.grammar import Answer
from mtp.sampling.sampler import Draft, History, draw, key_array, shared_settings
from proto.params import SamplingParams


class MTPHead(nn.Module):
    """The modules of the head, with their names within `mtp.`. lm_head and embedding are those of the backbone.

    `fc` maps `[…, 2H]`, embedding first, to `[…, H]`.
    """

    reads_streams: ClassVar[bool] = False
    """True if the hidden state of a token is the row after the last layer, and not that after the final norm."""

    reads_around_holes: ClassVar[bool] = True
    """True if the cache of the head can be read around rejected rows, as a chain of drafts does on the device."""

    def __init__(self, args: TextModelArgs, layer: nn.Module | None = None) -> None:
        """Take the decoder layer; None is one of gated attention."""
        super().__init__()
        hidden = args.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden, eps=args.rms_norm_eps)
        # With an interval of 1 every layer is a full-attention one.
        usual = DecoderLayer(replace(args, full_attention_interval=1), layer_idx=0) if layer is None else layer
        self.layers: Any = [usual]
        self.norm = nn.RMSNorm(hidden, eps=args.rms_norm_eps)
        self._block: Layer | None = None

    @property
    def block(self) -> Layer:
        """The decoder layer: the reference, or the variant that was set."""
        return self._reference() if self._block is None else self._block

    @block.setter
    def block(self, layer: Layer) -> None:
        self._block = layer

    def _reference(self) -> Layer:
        return AttentionLayer(self.layers[0])

    @property
    def width(self) -> int:
        """Values of a hidden state."""
        return int(self.norm.weight.shape[0])

    def output(self, rows: mx.array) -> mx.array:
        """Return the input of lm_head for rows of `advance`."""
        return rows

    def advance(
        self,
        embedded: mx.array,
        hidden: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """Compute pairs as flat rows: `embedded[i]` of token t+1 and `hidden[i]` of token t, both `[rows, hidden]`.

        `hidden` is the backbone's state after its final norm, or the head's own output. Sequence i owns the next
        `widths[i]` rows, which are appended to `caches[i]`. Returns `[rows, hidden]` after `norm`, the input of lm_head
        for token t+2.
        """
        e = self.pre_fc_norm_embedding(embedded)
        h = self.pre_fc_norm_hidden(hidden)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        return self._after(self.block.forward(x, caches, widths, holes=holes))

    def _after(self, rows: mx.array) -> mx.array:
        """Return the rows of `advance` from those of the decoder layer."""
        normed: mx.array = self.norm(rows)
        return normed


FORCED_DRAFTS = 4
"""Drafts of a window that forced tokens may fill: the most that `--mtp auto` uses, whose kernels are compiled at load.
"""

MOST_WAITING = 64
"""Pairs that wait while no drafts are requested. One pass then computes all of them."""


@dataclass
class HeadState:
    """The state of the head for one sequence: the cache, and the pairs that are not computed yet.

    `newest [1, hidden]` is the newest hidden state. If its `successor` is known, so is its pair.
    """

    cache: KVRows
    newest: mx.array | None = None
    successor: int | None = None
    waiting_hidden: list[mx.array] = field(default_factory=list)
    waiting_tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Known pairs: the number of tokens of the sequence whose successor is known."""
        return int(self.cache.offset) + len(self.waiting_tokens)

    def add_pairs(self, hidden: mx.array, tokens: Sequence[int], successor: int | None) -> None:
        """Add the pairs of the next `n` verified tokens: `hidden [n, hidden]`, and the token after them if known."""
        self.continue_with(tokens[0])
        following = [*tokens[1:], *([] if successor is None else [successor])]
        self._wait(hidden[: len(following)], following)
        self.newest, self.successor = mx.contiguous(hidden[-1:]), successor

    def continue_with(self, token: int) -> None:
        """Make `token` the successor of the newest hidden state: the text continues with it."""
        if self.newest is not None and self.successor != token:
            self._forget_successor()
            self._wait(self.newest, [token])
            self.successor = token

    def _wait(self, hidden: mx.array, following: Sequence[int]) -> None:
        if following:
            # A contiguous copy, since a view of a few rows would keep the hidden states of the whole frame in memory.
            self.waiting_hidden.append(mx.contiguous(hidden))
            self.waiting_tokens.extend(following)

    def take_waiting(self) -> tuple[list[mx.array], list[int]]:
        """Return the hidden states and the tokens of the waiting pairs, which the caller computes."""
        waiting = self.waiting_hidden, self.waiting_tokens
        self.waiting_hidden, self.waiting_tokens = [], []
        return waiting

    def _forget_successor(self) -> None:
        """Remove the newest pair: the text continues with another token, as after a shared prefix."""
        if self.successor is None:
            return
        if not self.waiting_tokens:
            self.cache.trim(1)
            return
        self.waiting_tokens.pop()
        last = self.waiting_hidden.pop()
        if last.shape[0] > 1:
            self.waiting_hidden.append(last[:-1])

    def end_window(self, hidden: mx.array, accepted: int, successor: int, surplus: int) -> None:
        """End a window whose pairs are computed: drop the newest `surplus` pairs, of rejected rows and of drafts.

        `hidden` are the states of the window, of which `accepted` rows stay, and `successor` is the token after them.
        """
        if surplus:
            self.cache.trim(surplus)
        self.newest, self.successor = mx.contiguous(hidden[accepted - 1 : accepted]), successor

    def copy(self) -> HeadState:
        """Return an independent copy."""
        hidden, tokens = list(self.waiting_hidden), list(self.waiting_tokens)
        return HeadState(self.cache.copy(), self.newest, self.successor, hidden, tokens)

    def arrays(self) -> list[mx.array]:
        """Return all arrays of the state, for `mx.eval` and for counting bytes."""
        newest = [] if self.newest is None else [self.newest]
        return [*self.cache.arrays(), *self.waiting_hidden, *newest]


@dataclass(frozen=True)
class DraftJob:
    """A request for `depth` drafts after `token`, which is at `position` and not in `history` yet.

    With a `constraint`, `answer` are the tokens of the answer up to `token`. The tokens that it forces are the first
    drafts, also more than `depth` of them. They cost no pass.
    """

    state: HeadState
    depth: int
    token: int
    position: int
    params: SamplingParams
    history: History | None = None
    constraint: Constraint | None = None
    answer: Answer = field(default_factory=Answer)

    @cached_property
    def forced(self) -> tuple[int, ...]:
        """The first drafts, which the constraint forces."""
        if self.constraint is None:
            return ()
        return tuple(self.constraint.forced(self.answer)[: max(self.depth, FORCED_DRAFTS)])


@dataclass(frozen=True)
class Drafts:
    """The drafts of a chain. `scores` are those that `Draft` has, for the ratio rule only."""

    tokens: tuple[int, ...]
    scores: tuple[mx.array | None, ...] = ()

    def __getitem__(self, index: int) -> Draft:
        return Draft(self.tokens[index], self.scores[index] if index < len(self.scores) else None)


class Drafter:
    """The head with the embedding and the output projection that it shares with the backbone."""

    def __init__(
        self,
        head: MTPHead,
        embed: Callable[[mx.array], mx.array],
        unembed: Callable[[mx.array], mx.array],
        kv_format: KVFormat,
    ) -> None:
        self.head = head
        self.embed = embed
        self.unembed: Callable[[mx.array], mx.array] = lambda rows: unembed(head.output(rows))
        self.kv_format = kv_format

    def new_state(self) -> HeadState:
        """Return the state of a new sequence."""
        return HeadState(self.head.block.new_cache(self.kv_format))

    def advance(
        self,
        tokens: mx.array,
        hidden: mx.array,
        caches: Sequence[KVRows],
        widths: Sequence[int],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """Return the head's outputs for pairs of `hidden` and the `tokens` after them. See `MTPHead.advance`."""
        return self.head.advance(self.embed(tokens), hidden, caches, widths, holes)

    def catch_up(self, states: Sequence[HeadState]) -> mx.array:
        """Compute the waiting pairs of all states, at least one each, in one pass. Returns one last output a state."""
        waiting = [state.take_waiting() for state in states]
        hidden = mx.concatenate([rows for known, _ in waiting for rows in known])
        tokens = mx.array([token for _, following in waiting for token in following], mx.uint32)
        widths = [len(following) for _, following in waiting]
        out = self.advance(tokens, hidden, [s.cache for s in states], widths)
        ends = [sum(widths[: i + 1]) - 1 for i in range(len(widths))]
        return out if len(ends) == out.shape[0] else out[mx.array(ends)]

    def catch_up_if_full(self, states: Sequence[HeadState]) -> None:
        """Compute the waiting pairs of states that have too many. For the others, release the memory of the frame.

        It has no collective, so members of a group may call it at different moments: the output of the head's one
        layer is dropped, and its keys and values need no sum.
        """
        full = [s for s in states if len(s.waiting_tokens) >= MOST_WAITING]
        if full:
            self.catch_up(full)
        mx.async_eval([s.arrays() for s in states])

    def draft(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        """Chain `depth` drafts for every job; all jobs share one pass per position.

        The input of step i is the head's own output of the step before and the token drafted from it. Afterwards every
        cache holds only the pairs of the text.
        """
        chained = iter(self._draft_chains([job for job in jobs if len(job.forced) < job.depth]))
        return [next(chained) if len(job.forced) < job.depth else Drafts(job.forced) for job in jobs]

    def _draft_chains(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        if not jobs:
            return []
        hidden = self.catch_up([job.state for job in jobs])
        chains = [_Chain(job) for job in jobs]
        active = chains
        for step in range(max(job.depth for job in jobs)):
            if step > 0:
                rows = [i for i, chain in enumerate(active) if chain.job.depth > step]
                active = [active[i] for i in rows]
                hidden = hidden if len(rows) == hidden.shape[0] else hidden[mx.array(rows)]
                tokens = mx.concatenate([chain.tokens[-1] for chain in active])
                caches = [chain.job.state.cache for chain in active]
                hidden = self.advance(tokens, hidden, caches, [1] * len(active))
            logits = self.unembed(hidden)
            for row, chain in enumerate(active):
                chain.draw(logits[row : row + 1])
            # A GPU computes these drafts while Python builds the next step.
            mx.async_eval([chain.tokens[-1] for chain in active])
        mx.eval([(chain.tokens, chain.scores, chain.job.state.arrays()) for chain in chains])
        return [chain.end() for chain in chains]


class _Chain:
    """The drafts of one job, each lazy `[1]`."""

    def __init__(self, job: DraftJob) -> None:
        self.job = job
        self.tokens: list[mx.array] = []
        self.scores: list[mx.array | None] = []

    def draw(self, logits: mx.array) -> None:
        """Draw the next draft from `logits [1, vocab]`, unless it is forced."""
        job = self.job
        if len(self.tokens) < len(job.forced):
            self.tokens.append(mx.array([job.forced[len(self.tokens)]], mx.int32))
            self.scores.append(None)
            return
        position = job.position + 1 + len(self.tokens)
        pending = mx.concatenate([mx.array([job.token], mx.int32), *self.tokens])
        if job.constraint is not None:
            drafted = cast(list[int], pending[1:].tolist())
            logits = job.constraint.mask(logits, job.answer.with_pending(drafted))
        keys = partial(key_array, [(job.params.seed, position)])
        drawn = draw(logits, job.params, keys, job.history, pending)
        self.tokens.append(drawn.tokens)
        self.scores.append(drawn.scores if job.params.ratio else None)

    def end(self) -> Drafts:
        """Return the evaluated drafts, and remove the entries of the chain from the cache of the head."""
        if self.job.depth > 1:
            self.job.state.cache.trim(self.job.depth - 1)
        return Drafts(tuple(cast(int, t.item()) for t in self.tokens), tuple(self.scores))


Key = tuple[int, int]


@dataclass(frozen=True)
class WindowJob:
    """A request for `depth` drafts after a window at `position`, whose tokens are `token` and then `drafts`.

    `hidden [rows, hidden]` are the window's states after the final norm, and `targets [rows]` the target's choices
    after each row, lazy. A prompt chunk has no `drafts`, and `following` are its tokens after the first.
    """

    key: Key
    state: HeadState
    depth: int
    position: int
    params: SamplingParams
    hidden: mx.array
    targets: mx.array
    token: int
    drafts: Sequence[int] = ()
    following: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Number of rows of the window."""
        return int(self.hidden.shape[0])

    def rejected(self) -> mx.array | None:
        """Return the number of rejected rows, int32 `[1]`, lazy, or None if none can be rejected."""
        if not self.drafts:
            return None
        same = self.targets[:-1] == mx.array(list(self.drafts), mx.int32)
        accepted = mx.cumprod(same.astype(mx.int32)).sum(keepdims=True)
        return len(self.drafts) - accepted.astype(mx.int32)


class WindowDrafts:
    """The drafts of some windows, lazy in `tokens` until the host has read them.

    Only the device knows the accepted lengths, so that the host waits once a frame. `Drafter.draft` is the reference.
    The head computes the pairs of all rows, and the chain begins at the last accepted row. The host removes the pairs
    of rejected rows once it has read how many there are.
    """

    def __init__(self, drafter: Drafter, jobs: Sequence[WindowJob]) -> None:
        self.keys = tuple(job.key for job in jobs)
        self._jobs = jobs
        self._rejected = [job.rejected() for job in jobs]
        self._drafter = drafter
        self._holes: list[Hole] = []
        """The rejected rows in the cache of each job; none if no row can be rejected."""
        self._active = [list(range(len(jobs)))]
        """The jobs of each step of the chain."""
        self._scores: list[list[mx.array]] = [[] for _ in jobs]
        hidden = self._begin()
        steps = [self._draw(hidden, 0)]
        for step in range(1, max(job.depth for job in jobs)):
            mx.async_eval(steps[-1])  # a GPU computes them while Python builds the next step
            hidden = self._advance(hidden, steps[-1], step)
            steps.append(self._draw(hidden, step))
        self.tokens = steps[0] if len(steps) == 1 else mx.concatenate(steps)
        """int32, the drafts of every step one after another."""

    def arrays(self) -> list[mx.array]:
        """Return the arrays of the heads, to compute with the drafts."""
        scores = [array for found in self._scores for array in found]
        return scores + [array for job in self._jobs for array in job.state.arrays()]

    def finish(self, tokens: Sequence[int], accepted: Sequence[tuple[int, int]]) -> dict[Key, Drafts]:
        """Return the drafts of each window from the read `tokens`. Removes the pairs of rejected rows and of the chain.

        `accepted` has the accepted length of each window and the token after it.
        """
        drafts: list[list[int]] = [[] for _ in self._jobs]
        values = iter(tokens)
        for active in self._active:
            for index in active:
                drafts[index].append(next(values))
        for job, (length, token) in zip(self._jobs, accepted, strict=True):
            job.state.end_window(job.hidden, length, token, job.rows - length + job.depth - 1)
        found = zip(self._jobs, drafts, self._scores, strict=True)
        return {job.key: Drafts(tuple(drafted), tuple(scores)) for job, drafted, scores in found}

    def _begin(self) -> mx.array:
        """Compute the waiting pairs and those of the windows. Return the outputs at the last accepted rows."""
        hidden: list[mx.array] = []
        tokens: list[mx.array] = []
        ends: list[int] = []
        widths: list[int] = []
        for job in self._jobs:
            job.state.continue_with(job.token)
            waiting, waiting_tokens = job.state.take_waiting()
            hidden += [*waiting, job.hidden]
            if waiting_tokens:
                tokens.append(mx.array(waiting_tokens, mx.int32))
            if job.following:
                tokens.append(mx.array(list(job.following), mx.int32))
            tokens.append(job.targets)
            widths.append(len(waiting_tokens) + job.rows)
            ends.append(sum(widths) - 1)
        out = self._drafter.advance(
            _concatenated(tokens),
            _concatenated(hidden),
            [job.state.cache for job in self._jobs],
            widths,
        )
        if any(rejected is not None for rejected in self._rejected):
            none = mx.array([0], mx.int32)
            counts = [none if rejected is None else rejected for rejected in self._rejected]
            self._holes = [
                Hole(int(job.state.cache.offset), count, len(job.drafts))
                for job, count in zip(self._jobs, counts, strict=True)
            ]
            return out[mx.array(ends, mx.int32) - _concatenated(counts)]
        return out if len(ends) == out.shape[0] else out[mx.array(ends)]

    def _advance(self, hidden: mx.array, drawn: mx.array, step: int) -> mx.array:
        """Return the head's outputs for the drafts `drawn` of the step before, where more drafts are asked for."""
        before = self._active[-1]
        rows = [row for row, index in enumerate(before) if self._jobs[index].depth > step]
        active = [before[row] for row in rows]
        self._active.append(active)
        if len(rows) < len(before):
            hidden, drawn = hidden[mx.array(rows)], drawn[mx.array(rows)]
        caches = [self._jobs[index].state.cache for index in active]
        holes = [self._holes[index] for index in active] if self._holes else ()
        return self._drafter.advance(drawn, hidden, caches, [1] * len(active), holes)

    def _draw(self, hidden: mx.array, step: int) -> mx.array:
        """Draw a draft from each row of `hidden`: int32 `[rows]`."""
        logits = self._drafter.unembed(hidden)
        groups: dict[tuple[Any, ...], list[int]] = {}
        active = self._active[-1]
        for row, index in enumerate(active):
            settings = shared_settings(self._jobs[index].params)
            assert settings is not None, "drafts that depend on the host are not drawn here"
            groups.setdefault(settings, []).append(row)
        tokens, order = [], []
        for rows in groups.values():
            own = logits if len(rows) == len(active) else logits[mx.array(rows)]
            jobs = [active[row] for row in rows]
            params = self._jobs[jobs[0]].params
            drawn = draw(own, params, partial(self._keys, jobs, step))
            tokens.append(drawn.tokens)
            order += rows
            for row, index in enumerate(jobs):
                if self._jobs[index].params.ratio:
                    self._scores[index].append(drawn.scores[row : row + 1])
        found = _concatenated(tokens)
        if order == sorted(order):
            return found
        return found[mx.array(sorted(range(len(order)), key=order.__getitem__))]

    def _keys(self, jobs: Sequence[int], step: int) -> mx.array:
        """Return the keys of the noise of the drafts of one step: uint32 `[len(jobs), 2]`, lazy."""
        keys = []
        for index in jobs:
            job, rejected = self._jobs[index], self._rejected[index]
            last = job.position + job.rows + 1 + step
            if rejected is None:
                keys.append(key_array([(job.params.seed, last)]))
            else:  # one for each number of rejected rows
                places = [(job.params.seed, last - count) for count in range(job.rows)]
                keys.append(key_array(places)[rejected])
        return _concatenated(keys)


def _concatenated(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
