"""Drafts after windows whose accepted lengths only the device knows, so that the host waits once a frame.

`Drafter.draft` is the reference: it drafts after the host has read the accepted lengths. Here the head computes the
pairs of all rows of a window. The output at the last accepted row begins the chain, and the host removes the pairs of
rejected rows once it has read how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mtp.head.drafter import Drafter, HeadState
from mtp.layers.layer import Hole
from mtp.sampling.choice import choose_with_keys, shared_settings
from mtp.sampling.filters import Stream, key_array
from proto.params import SamplingParams

Key = tuple[int, int]


@dataclass(frozen=True)
class WindowJob:
    """A request for `depth` drafts after a window at `position`, whose tokens are `token` and then `drafts`.

    `hidden [rows, hidden]` are the window's states after the final norm, and `targets [rows]` the target's choices
    after each row, lazy. A prompt chunk has no `drafts` to verify: all of its rows are accepted, and `following` are
    its tokens after the first.
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

    def successors(self) -> mx.array:
        """Return the token after each row: int32 `[rows]`. Those of rejected rows have no meaning."""
        if not self.following:
            return self.targets
        return mx.concatenate([mx.array(list(self.following), mx.int32), self.targets])

    def rejected(self) -> mx.array | None:
        """Return the number of rejected rows, int32 `[1]`, lazy, or None if none can be rejected."""
        if not self.drafts:
            return None
        same = self.targets[:-1] == mx.array(list(self.drafts), mx.int32)
        accepted = mx.cumprod(same.astype(mx.int32)).sum(keepdims=True)
        return len(self.drafts) - accepted.astype(mx.int32)


class WindowDrafts:
    """The drafts of some windows, lazy in `tokens` until the host has read them."""

    def __init__(self, drafter: Drafter, jobs: Sequence[WindowJob]) -> None:
        self.keys = tuple(job.key for job in jobs)
        self._jobs = jobs
        self._rejected = [job.rejected() for job in jobs]
        self._drafter = drafter
        self._holes: list[Hole] = []
        """The rejected rows in the cache of each job; none if no row can be rejected."""
        self._active = [list(range(len(jobs)))]
        """The jobs of each step of the chain."""
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
        return [array for job in self._jobs for array in job.state.arrays()]

    def finish(
        self, tokens: Sequence[int], accepted: Sequence[tuple[int, int]]
    ) -> dict[Key, tuple[int, ...]]:
        """Return the drafts of each window from the read `tokens`.

        `accepted` has the accepted length of each window and the token after it. Removes the pairs of rejected rows and
        of the chain from the caches of the heads.
        """
        drafts: list[list[int]] = [[] for _ in self._jobs]
        values = iter(tokens)
        for active in self._active:
            for index in active:
                drafts[index].append(next(values))
        for job, (length, token) in zip(self._jobs, accepted, strict=True):
            job.state.end_window(job.hidden, length, token, job.rows - length + job.depth - 1)
        return {job.key: tuple(drafted) for job, drafted in zip(self._jobs, drafts, strict=True)}

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
            tokens.append(job.successors())
            widths.append(len(waiting_tokens) + job.rows)
            ends.append(sum(widths) - 1)
        out = self._drafter.advance(
            _joined(tokens), _joined(hidden), [job.state.cache for job in self._jobs], widths
        )
        if any(rejected is not None for rejected in self._rejected):
            none = mx.array([0], mx.int32)
            counts = [none if rejected is None else rejected for rejected in self._rejected]
            self._holes = [
                Hole(int(job.state.cache.offset), count)
                for job, count in zip(self._jobs, counts, strict=True)
            ]
            return out[mx.array(ends, mx.int32) - _joined(counts)]
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
        groups: dict[tuple[float, ...], list[int]] = {}
        active = self._active[-1]
        for row, index in enumerate(active):
            settings = shared_settings(self._jobs[index].params)
            assert settings is not None, "drafts that depend on the host are not drawn here"
            groups.setdefault(settings, []).append(row)
        drawn, order = [], []
        for rows in groups.values():
            own = logits if len(rows) == len(active) else logits[mx.array(rows)]
            jobs = [active[row] for row in rows]
            params = self._jobs[jobs[0]].params
            drawn.append(choose_with_keys(own, params, partial(self._keys, jobs, step)))
            order += rows
        tokens = _joined(drawn)
        if order == sorted(order):
            return tokens
        return tokens[mx.array(sorted(range(len(order)), key=order.__getitem__))]

    def _keys(self, jobs: Sequence[int], step: int) -> mx.array:
        """Return the keys of the noise of the drafts of one step: uint32 `[len(jobs), 2]`, lazy."""
        keys = []
        for index in jobs:
            job, rejected = self._jobs[index], self._rejected[index]
            last = job.position + job.rows + 1 + step
            if rejected is None:
                keys.append(key_array([(job.params.seed, last)], Stream.TARGET))
            else:  # one for each number of rejected rows
                places = [(job.params.seed, last - count) for count in range(job.rows)]
                keys.append(key_array(places, Stream.TARGET)[rejected])
        return _joined(keys)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
