"""The verdict of the last stage about one frame: outcomes from the device's tokens, and what follows for the sequences.

The decision is made twice from the same targets. The device needs it to draft on without waiting for the host. The host
repeats it once it has read the targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import mlx.core as mx

from mtp.head.drafter import Drafter, DraftJob, Drafts
from mtp.head.window_drafts import WindowDrafts
from mtp.sampling.acceptance import accepted_length
from mtp.sampling.choice import Logprobs
from proto.errors import ProtocolError
from proto.frame import Outcome, Segment, TokenLogprob
from proto.frame_stamps import FrameStamps, StageStep
from worker.cache.last_stage_state import LastStageState, UnconfirmedToken

Key = tuple[int, int]
"""(seq_id, window)"""


@dataclass(frozen=True)
class VerifiedRun:
    """A segment that ran, with the state of its sequence and the first of its rows in the frame."""

    segment: Segment
    state: LastStageState
    start: int

    @property
    def key(self) -> Key:
        """The key of the segment's outcome."""
        return key_of(self.segment)


@dataclass(frozen=True)
class Choice:
    """The target's tokens of some runs, each with its number of rows: int32 `[rows of all]`."""

    runs: Sequence[tuple[VerifiedRun, int]]
    tokens: mx.array

    def split(self) -> Iterator[tuple[VerifiedRun, int, int]]:
        """Yield each run with its first row of `tokens` and the row after its last."""
        start = 0
        for run, rows in self.runs:
            yield run, start, start + rows
            start += rows


@dataclass
class Verdict:
    """The lazy results of one frame. `finish` waits for them.

    `normed [rows, hidden]` are the hidden states after the final norm. `drafts` are those that the device draws without
    the host; all other drafts follow in `finish`.
    """

    drafter: Drafter | None
    runs: Sequence[VerifiedRun]
    normed: mx.array
    choices: Sequence[Choice]
    logprobs: Mapping[Key, Logprobs]
    drafts: WindowDrafts | None
    _packed: mx.array = field(init=False)

    def __post_init__(self) -> None:
        parts = [choice.tokens for choice in self.choices]
        if self.drafts is not None:
            parts.append(self.drafts.tokens)
        none = mx.zeros((0,), mx.int32)
        self._packed = parts[0] if len(parts) == 1 else mx.concatenate([none, *parts])

    def arrays(self) -> list[mx.array]:
        """Return the arrays to compute, without the states of the layers."""
        logprobs = [array for found in self.logprobs.values() for array in found]
        heads = [] if self.drafts is None else self.drafts.arrays()
        return [self._packed, self.normed, *logprobs, *heads]

    def finish(self, stamps: FrameStamps) -> dict[Key, Outcome]:
        """Wait for the device and return the outcome of every run, with its drafts."""
        mx.eval(self.normed, self._packed, [list(found) for found in self.logprobs.values()])
        stamps.mark(StageStep.COMPUTED)
        values = cast(list[int], self._packed.tolist())
        outcomes: dict[Key, Outcome] = {run.key: _prompt_chunk(run.segment) for run in self.runs}
        start = 0
        for choice in self.choices:
            for run, first, end in choice.split():
                outcomes[run.key] = self._decide(run, values[start + first : start + end])
            start += choice.tokens.size
        if self.drafts is not None:
            accepted = [_accepted(outcomes[key]) for key in self.drafts.keys]
            drafted = self.drafts.finish(values[start:], accepted)
            outcomes |= {key: replace(outcomes[key], drafts=drafted[key]) for key in drafted}
        self._append_verified(outcomes)
        return self._with_late_drafts(outcomes)

    def clean_up(self) -> None:
        """Let the heads catch up with long texts, and release the memory of the frame. Call it after `finish`."""
        if self.drafter is not None:
            heads = [run.state.head for run in self.runs]
            self.drafter.catch_up_if_full([head for head in heads if head is not None])

    def _decide(self, run: VerifiedRun, chosen: Sequence[int]) -> Outcome:
        segment, state = run.segment, run.state
        if not segment.open:
            return self._outcome(run, segment.width, chosen)
        if segment.continues:
            return self._outcome(run, 1, chosen)
        return self._outcome(run, accepted_length(segment.tokens, chosen, state.expected), chosen)

    def _outcome(self, run: VerifiedRun, count: int, chosen: Sequence[int]) -> Outcome:
        """Return the outcome with an accepted length of `count`, and with the log-probabilities that were asked for."""
        segment = run.segment
        if not count:
            return Outcome(segment.seq_id, segment.window, 0)
        emitted = list(chosen[:count]) if segment.open else list(chosen)
        found = self.logprobs.get(run.key)
        logprobs = () if found is None else _token_logprobs(emitted, found)
        return Outcome(segment.seq_id, segment.window, count, emitted[-1], logprobs=logprobs)

    def _append_verified(self, outcomes: Mapping[Key, Outcome]) -> None:
        """Append the verified tokens to the histories and to the pairs of the heads."""
        drafted = () if self.drafts is None else self.drafts.keys
        for run in self.runs:
            outcome, state, segment = outcomes[run.key], run.state, run.segment
            if not outcome.accepted_length:
                continue
            rows = self.normed[run.start : run.start + outcome.accepted_length]
            if segment.continues:
                assert state.expected is not None and outcome.token is not None
                token = UnconfirmedToken(segment.window, state.expected, rows, outcome.token)
                state.unconfirmed.append(token)
            else:
                tokens = segment.tokens[: outcome.accepted_length]
                state.append_tokens(tokens)
                if self.drafter is not None:
                    self.drafter.record_tokens(tokens, chosen=segment.open)
                if state.head is not None and run.key not in drafted:
                    state.head.add_pairs(rows, tokens, outcome.token)
            state.expected = outcome.token

    def _with_late_drafts(self, outcomes: dict[Key, Outcome]) -> dict[Key, Outcome]:
        """Add the drafts that depend on the host: on a history, a grammar or the ratio rule."""
        early = () if self.drafts is None else self.drafts.keys
        jobs: dict[Key, DraftJob] = {}
        states: dict[Key, LastStageState] = {}
        for run in self.runs:
            state, segment, outcome = run.state, run.segment, outcomes[run.key]
            if not segment.drafts or outcome.token is None or run.key in early:
                continue
            if state.head is None:
                raise ProtocolError("drafts are requested, but this checkpoint has no MTP head")
            jobs[run.key] = DraftJob(
                state.head,
                segment.drafts,
                outcome.token,
                segment.position + outcome.accepted_length,
                state.params,
                state.history,
                state.grammar,
                state.answer_with([outcome.token]) if state.grammar else (),
            )
            states[run.key] = state
        if not jobs or self.drafter is None:
            return outcomes
        drafts: Sequence[Drafts] = self.drafter.draft(list(jobs.values()))
        for key, drafted in zip(jobs, drafts, strict=True):
            states[key].draft_scores = drafted.scores
            outcomes[key] = replace(outcomes[key], drafts=drafted.tokens)
        return outcomes


def key_of(segment: Segment) -> Key:
    """Return the key of a segment's outcome."""
    return segment.seq_id, segment.window


def _accepted(outcome: Outcome) -> tuple[int, int]:
    """Return the accepted length, and the token after the accepted ones."""
    assert outcome.token is not None
    return outcome.accepted_length, outcome.token


def _prompt_chunk(segment: Segment) -> Outcome:
    return Outcome(segment.seq_id, segment.window, accepted_length=segment.width)


def _token_logprobs(tokens: Sequence[int], found: Logprobs) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the first rows of `found`, which belong to `tokens`."""
    chosen = cast(list[float], found.chosen.tolist())
    top_ids = cast(list[list[int]], found.top_tokens.tolist())
    top_values = cast(list[list[float]], found.top.tolist())
    return tuple(
        TokenLogprob(token, p, tuple(zip(ids, values, strict=True)))
        for token, p, ids, values in zip(tokens, chosen, top_ids, top_values, strict=False)
    )
