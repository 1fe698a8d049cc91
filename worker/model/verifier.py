"""The verifier of the last stage: final norm, logits, the target's choice, its comparison with the drafts, new drafts.

Logits never leave this stage. For each window `[t0, d1 … dk]` the target's own token is computed at every row. A draft
is accepted when it equals the target's token (coupled), or passes the ratio test. The hidden states of the accepted
rows are the input of the MTP head, which drafts the next tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mtp.head.attention import KVFormat
from mtp.head.drafter import Drafter, DraftJob, Drafts
from mtp.sampling.acceptance import accepted_length, ratio_targets
from mtp.sampling.choice import Logprobs, choose, choose_rows, logprobs, shared_settings
from mtp.sampling.filters import filtered
from mtp.sampling.grammar import GrammarState
from mtp.sampling.history import History
from proto.errors import ProtocolError
from proto.frame import Admit, Outcome, Segment, TokenLogprob
from proto.frame_stamps import FrameStamps, StageStep
from worker.cache.last_stage_state import LastStageState
from worker.model.loader import StageModules
from worker.model.stage import Run

Key = tuple[int, int]
"""(seq_id, window)"""


@dataclass(frozen=True)
class Choice:
    """The target's tokens of some segments, each with its number of rows: int32 `[rows of all]`."""

    segments: Sequence[tuple[Segment, int]]
    tokens: mx.array

    def read(self) -> Iterator[tuple[Segment, list[int]]]:
        """Yield each segment with its evaluated tokens."""
        tokens = cast(list[int], self.tokens.tolist())
        start = 0
        for segment, rows in self.segments:
            yield segment, tokens[start : start + rows]
            start += rows


class Verifier:
    """The parts after the layers: norm, lm_head (or tied embedding), and the MTP head if the checkpoint has it."""

    def __init__(self, modules: StageModules, kv_format: KVFormat) -> None:
        assert modules.norm is not None, "this stage is not the last"
        self.norm = modules.norm
        self.vocab = modules.config.vocab_size
        self.exempt = modules.config.eos_token_ids
        self.unembed = _unembedding(modules)
        self.drafter: Drafter | None = None
        if modules.head is not None:
            assert modules.embed_tokens is not None, "a head needs the embedding beside it"
            self.drafter = Drafter(
                modules.head, modules.embed_tokens, self.unembed, kv_format, self.exempt
            )
        self.states: dict[int, LastStageState] = {}
        self.vocabulary = b""
        """The tokenizer's packed vocabulary, from the first sequence with a grammar."""

    # ---- sequences

    def admit(self, op: Admit) -> None:
        """Create the state of a sequence."""
        head = None if self.drafter is None else self.drafter.new_state()
        history = History(self.vocab, op.prompt) if op.params.penalized else None
        self.vocabulary = op.vocabulary or self.vocabulary
        grammar = GrammarState.make(op.params, self.vocabulary)
        # The vocabulary may have megabytes, so the state does not include it.
        admitted = replace(op, vocabulary=b"") if op.vocabulary else op
        self.states[op.seq_id] = LastStageState(admitted, head, history=history, grammar=grammar)

    def evict(self, seq_id: int) -> None:
        """Remove the state of a sequence, if there is one."""
        self.states.pop(seq_id, None)

    def save(self, seq_id: int) -> LastStageState:
        """Return a copy of a sequence's state for a prefix entry, without the parameters of the request."""
        state = self.states[seq_id]
        head = None if state.head is None else state.head.copy()
        return LastStageState(state.admitted, head, tokens=list(state.tokens))

    def restore(self, seq_id: int, saved: LastStageState) -> None:
        """Continue an admitted sequence from a saved copy."""
        state = self.states[seq_id]
        state.head = None if saved.head is None else saved.head.copy()
        state.append_tokens(saved.tokens)

    # ---- one frame

    def verify(
        self,
        x: mx.array,
        runs: Sequence[Run],
        states: Sequence[mx.array],
        stamps: FrameStamps,
    ) -> dict[Key, Outcome]:
        """Return the outcome of every segment of `x [rows, hidden]`. Evaluates `states`, so that no lazy graph grows.

        Raises ProtocolError when drafts are requested and this checkpoint has no head.
        """
        normed = self.norm(x)
        logits = self._logits(normed, runs)
        choices = self._choices(logits)
        stamps.mark(StageStep.BUILT)
        mx.eval(normed, [choice.tokens for choice in choices], *states)
        stamps.mark(StageStep.COMPUTED)
        decided = {
            _key(s): self._decide(s, tokens) for choice in choices for s, tokens in choice.read()
        }
        outcomes = {_key(s): decided.get(_key(s)) or _prompt_chunk(s) for _, s in runs}
        self._append_verified(normed, runs, outcomes)
        with_logprobs = self._with_logprobs(logits, outcomes)
        return self._with_drafts(runs, with_logprobs)

    def outcomes(
        self, segments: Sequence[Segment], decided: Mapping[Key, Outcome]
    ) -> tuple[Outcome, ...]:
        """Return the outcomes in the order of `segments`. A segment that did not run is marked as cancelled."""
        return tuple(
            decided.get(_key(s)) or Outcome(s.seq_id, s.window, accepted_length=0, cancelled=True)
            for s in segments
        )

    def _logits(self, normed: mx.array, runs: Sequence[Run]) -> list[tuple[Segment, mx.array]]:
        """Return the logits `[w, vocab]` of sampled segments: of all rows of a window, of the last row of a prompt."""
        wanted: list[tuple[Segment, int, int]] = []
        start = 0
        for _, segment in runs:
            end = start + segment.width
            if segment.open:
                wanted.append((segment, start, end))
            elif segment.sample:
                wanted.append((segment, end - 1, end))
            start = end
        if not wanted:
            return []
        rows = [i for _, first, last in wanted for i in range(first, last)]
        selected = normed if len(rows) == normed.shape[0] else normed[mx.array(rows)]
        logits = self.unembed(selected)
        parts, row = [], 0
        for segment, first, last in wanted:
            parts.append((segment, logits[row : row + last - first]))
            row += last - first
        return parts

    def _choices(self, logits: Sequence[tuple[Segment, mx.array]]) -> list[Choice]:
        """Return the target's tokens after every row, in one call for all rows of equal settings."""
        together: dict[tuple[float, ...], list[tuple[Segment, mx.array]]] = {}
        found = []
        for segment, rows in logits:
            state = self.states[segment.seq_id]
            settings = None if state.grammar is not None else shared_settings(state.params)
            if settings is None or _ratio_applies(state, segment):
                found.append(
                    Choice([(segment, rows.shape[0])], self._targets(state, segment, rows))
                )
            else:
                together.setdefault(settings, []).append((segment, rows))
        for group in together.values():
            rows = group[0][1] if len(group) == 1 else mx.concatenate([rows for _, rows in group])
            params = self.states[group[0][0].seq_id].params
            tokens = choose_rows(rows, params, [p for s, r in group for p in self._places(s, r)])
            found.append(Choice([(segment, rows.shape[0]) for segment, rows in group], tokens))
        return found

    def _places(self, segment: Segment, logits: mx.array) -> list[tuple[int, int]]:
        """Return the seed and the position that each row predicts."""
        seed = self.states[segment.seq_id].params.seed
        end = segment.position + segment.width + 1
        return [(seed, position) for position in range(end - logits.shape[0], end)]

    def _targets(self, state: LastStageState, segment: Segment, logits: mx.array) -> mx.array:
        """Return the target's token after each row: int32 `[w]`, lazy."""
        params, rows = state.params, logits.shape[0]
        if state.grammar is not None:
            logits = state.grammar.mask(logits, state.answer_with(segment.tokens))
        first = segment.position + segment.width - rows + 1
        drafts, scores = segment.tokens[1:], state.draft_scores
        if scores is None or not _ratio_applies(state, segment):
            return choose(logits, params, first, state.history, segment.tokens, self.exempt)
        target_scores = filtered(logits, params, first, state.history, segment.tokens, self.exempt)
        return ratio_targets(target_scores, scores[: len(drafts)], drafts, params.seed, first)

    def _decide(self, segment: Segment, chosen: Sequence[int]) -> Outcome:
        if not segment.open:
            return Outcome(segment.seq_id, segment.window, segment.width, chosen[0])
        expected = self.states[segment.seq_id].expected
        count = accepted_length(segment.tokens, chosen, expected)
        token = chosen[count - 1] if count else None
        return Outcome(segment.seq_id, segment.window, count, token)

    def _append_verified(
        self, normed: mx.array, runs: Sequence[Run], outcomes: Mapping[Key, Outcome]
    ) -> None:
        """Append the verified tokens to the histories and to the pairs of the heads."""
        start = 0
        for _, segment in runs:
            outcome, state = outcomes[_key(segment)], self.states[segment.seq_id]
            if outcome.accepted_length:
                tokens = segment.tokens[: outcome.accepted_length]
                state.append_tokens(tokens)
                state.expected = outcome.token
                if state.head is not None:
                    state.head.add_pairs(
                        normed[start : start + outcome.accepted_length], tokens, outcome.token
                    )
            start += segment.width

    def _with_logprobs(
        self, logits: Sequence[tuple[Segment, mx.array]], outcomes: Mapping[Key, Outcome]
    ) -> dict[Key, Outcome]:
        """Add the target's log-probabilities of the emitted tokens to the outcomes that request them."""
        asked: dict[Key, tuple[list[int], Logprobs]] = {}
        for segment, rows in logits:
            outcome = outcomes[_key(segment)]
            top = self.states[segment.seq_id].params.logprobs
            if top is None or outcome.token is None:
                continue
            emitted = [outcome.token]
            if segment.open:
                emitted = [*segment.tokens[1 : outcome.accepted_length], outcome.token]
            asked[_key(segment)] = emitted, logprobs(rows[: len(emitted)], emitted, top)
        mx.eval([found for _, found in asked.values()])
        return dict(outcomes) | {
            key: replace(outcomes[key], logprobs=_token_logprobs(emitted, found))
            for key, (emitted, found) in asked.items()
        }

    def _with_drafts(self, runs: Sequence[Run], outcomes: dict[Key, Outcome]) -> dict[Key, Outcome]:
        jobs: dict[Key, DraftJob] = {}
        for _, segment in runs:
            state, outcome = self.states[segment.seq_id], outcomes[_key(segment)]
            if not segment.drafts or outcome.token is None:
                continue
            if state.head is None:
                raise ProtocolError("drafts are requested, but this checkpoint has no MTP head")
            position = segment.position + outcome.accepted_length
            jobs[_key(segment)] = DraftJob(
                state.head,
                segment.drafts,
                outcome.token,
                position,
                state.params,
                state.history,
                state.grammar,
                state.answer_with([outcome.token]) if state.grammar else (),
            )
        if self.drafter is None:
            return outcomes
        drafts: Sequence[Drafts] = self.drafter.draft(list(jobs.values())) if jobs else ()
        for key, drafted in zip(jobs, drafts, strict=True):
            self.states[key[0]].draft_scores = drafted.scores
            outcomes[key] = replace(outcomes[key], drafts=drafted.tokens)
        heads = [self.states[s.seq_id].head for _, s in runs]
        self.drafter.catch_up_if_full([head for head in heads if head is not None])
        return outcomes


def _unembedding(modules: StageModules) -> Callable[[mx.array], mx.array]:
    """Return lm_head, or the embedding that it is tied to."""
    if modules.lm_head is not None:
        return modules.lm_head
    assert modules.embed_tokens is not None, "a tied lm_head needs the embedding beside it"
    return modules.embed_tokens.as_linear


def _key(segment: Segment) -> Key:
    return segment.seq_id, segment.window


def _prompt_chunk(segment: Segment) -> Outcome:
    return Outcome(segment.seq_id, segment.window, accepted_length=segment.width)


def _ratio_applies(state: LastStageState, segment: Segment) -> bool:
    """Return whether the tokens of a window depend on its drafts."""
    return state.draft_scores is not None and segment.open and segment.width > 1


def _token_logprobs(tokens: Sequence[int], found: Logprobs) -> tuple[TokenLogprob, ...]:
    chosen = cast(list[float], found.chosen.tolist())
    top_ids = cast(list[list[int]], found.top_tokens.tolist())
    top_values = cast(list[list[float]], found.top.tolist())
    return tuple(
        TokenLogprob(token, p, tuple(zip(ids, values, strict=True)))
        for token, p, ids, values in zip(tokens, chosen, top_ids, top_values, strict=True)
    )
