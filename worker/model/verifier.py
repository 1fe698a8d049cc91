"""The verifier of the last stage: final norm, logits, the target's choice, its comparison with the drafts, new drafts.

Logits never leave this stage. For each window `[t0, d1 … dk]` the target's own token is computed at every row. A draft
is accepted when it equals the target's token, which depends on the draft under the ratio rule. The hidden states of the
accepted rows are the input of the MTP head, which drafts the next tokens.

The verdict about a frame is decided twice from the same targets. The device needs it to draft on without waiting for
the host. The host repeats it once it has read the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mtp.head.drafter import Drafter, DraftJob, Drafts, WindowDrafts, WindowJob
from mtp.layers.layer import KVFormat
from mtp.sampling.constraint import Constraint
from mtp.sampling.sampler import (
    Draft,
    History,
    Logprobs,
    accepted_length,
    choose,
    choose_with_keys,
    key_array,
    logprobs,
    shared_settings,
)
from proto.errors import ProtocolError
from proto.frame import Admit, Commit, Outcome, Segment, TokenLogprob
from proto.frame_stamps import FrameStamps, StageStep
from proto.images import ImageLayout
from worker.cache.sequence_cache import ChosenToken, DraftedChain, LastStageState, UnconfirmedToken
from worker.model.loader import StageModules
from worker.model.stage import Run

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
        return self.segment.seq_id, self.segment.window


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

    `normed [rows, hidden]` follows the final norm. `drafts` are drawn without the host; all others follow in `finish`.
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
        outcomes = {run.key: Outcome(*run.key, run.segment.width) for run in self.runs}
        start = 0
        for choice in self.choices:
            for run, first, end in choice.split():
                outcomes[run.key] = self._outcome(run, values[start + first : start + end])
            start += choice.tokens.size
        if self.drafts is not None:
            accepted = [_accepted(outcomes[key]) for key in self.drafts.keys]
            drafted = self.drafts.finish(values[start:], accepted)
            self._add_drafts(outcomes, drafted)
        self._append_verified(outcomes)
        return self._with_late_drafts(outcomes)

    def clean_up(self) -> None:
        """Let the heads catch up with long texts, and release the memory of the frame. Call it after `finish`."""
        if self.drafter is not None:
            heads = [run.state.head for run in self.runs]
            self.drafter.catch_up_if_full([head for head in heads if head is not None])

    def _outcome(self, run: VerifiedRun, chosen: Sequence[int]) -> Outcome:
        """Return the outcome, with the log-probabilities that were asked for."""
        segment, count = run.segment, run.segment.width
        if segment.open and not segment.continues:
            count = accepted_length(segment.tokens, chosen, run.state.expected)
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
                # The coordinator sends this window when it knows the tokens before it, so they are confirmed.
                state.commit_window(segment.window - 1, accepted_length=1)
                tokens = state.words_of(segment.tokens[: outcome.accepted_length])
                state.append_tokens(tokens)
                if state.head is not None and run.key not in drafted:
                    state.head.add_pairs(rows, tokens, outcome.token)
            state.expected = outcome.token

    def _with_late_drafts(self, outcomes: dict[Key, Outcome]) -> dict[Key, Outcome]:
        """Add the drafts that depend on the host: on a history or a constraint."""
        early = () if self.drafts is None else self.drafts.keys
        jobs: dict[Key, DraftJob] = {}
        for run in self.runs:
            state, segment, outcome = run.state, run.segment, outcomes[run.key]
            if not segment.drafts or outcome.token is None or run.key in early:
                continue
            if state.head is None:
                raise ProtocolError("drafts are requested, but this checkpoint has no MTP head")
            head, params, constraint = state.head, state.params, state.constraint
            end = segment.position + outcome.accepted_length
            answer = state.answer_with([outcome.token])
            jobs[run.key] = DraftJob(
                head, segment.drafts, outcome.token, end, params, state.history, constraint, answer
            )
        if not jobs or self.drafter is None:
            return outcomes
        drafts = self.drafter.draft(list(jobs.values()))
        self._add_drafts(outcomes, dict(zip(jobs, drafts, strict=True)))
        return outcomes

    def _add_drafts(self, outcomes: dict[Key, Outcome], drafted: Mapping[Key, Drafts]) -> None:
        """Add the drafts to their outcomes. The ratio rule needs their scores, which stay here."""
        for run in self.runs:
            if (drafts := drafted.get(run.key)) is None:
                continue
            outcome = outcomes[run.key] = replace(outcomes[run.key], drafts=drafts.tokens)
            if run.state.params.ratio:
                first = run.segment.position + outcome.accepted_length + 1
                run.state.chains[run.segment.window] = DraftedChain(first, drafts)


def _accepted(outcome: Outcome) -> tuple[int, int]:
    assert outcome.token is not None
    return outcome.accepted_length, outcome.token


def _token_logprobs(tokens: Sequence[int], found: Logprobs) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the first rows of `found`, which belong to `tokens`."""
    chosen = cast(list[float], found.chosen.tolist())
    top_ids = cast(list[list[int]], found.top_tokens.tolist())
    top_values = cast(list[list[float]], found.top.tolist())
    return tuple(
        TokenLogprob(token, p, tuple(zip(ids, values, strict=True)))
        for token, p, ids, values in zip(tokens, chosen, top_ids, top_values, strict=False)
    )


class Verifier:
    """The parts after the layers: norm, lm_head (or tied embedding), and the MTP head if the checkpoint has it."""

    def __init__(self, modules: StageModules, kv_format: KVFormat) -> None:
        assert modules.norm is not None, "this stage is not the last"
        self.norm = modules.norm
        self.vocab = modules.config.vocab_size
        self.config = modules.config
        self.unembed = _unembedding(modules)
        self.drafter: Drafter | None = None
        if modules.head is not None:
            assert modules.embed_tokens is not None, "a head needs the embedding beside it"
            own: Callable[[mx.array], mx.array] = getattr(modules.head, "lm_head", self.unembed)
            unembed = modules.draft_rows or own
            self.drafter = Drafter(modules.head, modules.embed_tokens, unembed, kv_format)
        self.states: dict[int, LastStageState] = {}
        self.vocabulary = b""
        """The tokenizer's packed vocabulary, from the first sequence with a grammar."""

    # ---- sequences

    def admit(self, op: Admit) -> None:
        """Create the state of a sequence."""
        head = None if self.drafter is None else self.drafter.new_state()
        history = History(self.vocab, op.prompt) if op.params.penalized else None
        self.vocabulary = op.vocabulary or self.vocabulary
        constraint = Constraint.make(op.params, self.vocabulary, self.vocab)
        # The vocabulary may have megabytes, so the state does not include it.
        admitted = replace(op, vocabulary=b"") if op.vocabulary else op
        self.states[op.seq_id] = LastStageState(
            admitted, head, history=history, constraint=constraint, image_token=self.config.image_token
        )

    def evict(self, seq_id: int) -> None:
        """Remove the state of a sequence, if there is one."""
        self.states.pop(seq_id, None)

    def save_prefix(self, seq_id: int) -> LastStageState:
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

    def begin_verdict(
        self, x: mx.array, runs: Sequence[Run], states: Sequence[mx.array], stamps: FrameStamps
    ) -> Verdict:
        """Build the verdict about the segments of `x [rows, hidden]`, and let the device compute it with `states`."""
        normed = self.norm(x)
        verified = self._verified_runs(runs)
        logits = self._logits(normed, verified)
        choices = self._choices(logits)
        targets = {
            run.key: choice.tokens[first:end]
            for choice in choices
            for run, first, end in choice.split()
            if run.segment.drafts or run.state.params.logprobs is not None
        }
        found = {
            run.key: logprobs(rows, targets[run.key], run.state.params.logprobs)
            for run, rows in logits
            if run.state.params.logprobs is not None
        }
        reads_streams = self.drafter is not None and self.drafter.head.reads_streams
        hidden = x if reads_streams else normed
        drafts = self._early_drafts(hidden, verified, targets)
        for choice in choices:
            for run, first, end in choice.split():
                sure = end - first == 1
                run.state.chosen = ChosenToken(choice.tokens, first) if sure else None
        verdict = Verdict(self.drafter, verified, hidden, choices, found, drafts)
        stamps.mark(StageStep.BUILT)
        mx.async_eval(verdict.arrays(), *states)
        return verdict

    def _verified_runs(self, runs: Sequence[Run]) -> list[VerifiedRun]:
        verified, start = [], 0
        for _, segment in runs:
            state = self.states[segment.seq_id]
            if segment.continues and state.needs_host(segment):
                raise ProtocolError(f"sequence {segment.seq_id} cannot continue by itself")
            if state.admitted.images and state.head is not None:
                images = ImageLayout(state.admitted.images, self.config.image_sections)
                state.head.cache.layout = images
            verified.append(VerifiedRun(segment, state, start))
            start += segment.width
        return verified

    def next_tokens(self, segments: Sequence[Segment]) -> mx.array:
        """Return the first tokens of segments that continue: int32 `[len(segments)]`, or raise ProtocolError."""
        chosen = []
        for segment in segments:
            state = self.states[segment.seq_id]
            if state.chosen is None or state.needs_host(segment):
                raise ProtocolError(f"sequence {segment.seq_id} cannot continue by itself")
            chosen.append(state.chosen)
        tokens, rows = chosen[0].tokens, [one.row for one in chosen]
        if any(one.tokens is not tokens for one in chosen):
            return mx.concatenate([one.tokens[one.row : one.row + 1] for one in chosen])
        return tokens if rows == list(range(tokens.size)) else tokens[mx.array(rows)]

    def commit_window(self, op: Commit) -> None:
        """Apply a commit to the state of its sequence."""
        self.states[op.seq_id].commit_window(op.window, op.accepted_length)

    def outcomes(self, segments: Sequence[Segment], decided: Mapping[Key, Outcome]) -> tuple[Outcome, ...]:
        """Return the outcomes in the order of `segments`. A segment that did not run is marked as cancelled."""
        return tuple(
            decided.get(key) or Outcome(*key, accepted_length=0, cancelled=True)
            for key in ((s.seq_id, s.window) for s in segments)
        )

    def _logits(self, normed: mx.array, runs: Sequence[VerifiedRun]) -> list[tuple[VerifiedRun, mx.array]]:
        """Return the logits `[w, vocab]` of sampled segments: of all rows of a window, of the last row of a prompt."""
        wanted: list[tuple[VerifiedRun, int, int]] = []
        for run in runs:
            end = run.start + run.segment.width
            if run.segment.open:
                wanted.append((run, run.start, end))
            elif run.segment.sample:
                wanted.append((run, end - 1, end))
        if not wanted:
            return []
        rows = [i for _, first, last in wanted for i in range(first, last)]
        selected = normed if len(rows) == normed.shape[0] else normed[mx.array(rows)]
        logits = self.unembed(selected)
        parts, row = [], 0
        for run, first, last in wanted:
            own = logits if len(wanted) == 1 else logits[row : row + last - first]
            parts.append((run, own))
            row += last - first
        return parts

    def _choices(self, logits: Sequence[tuple[VerifiedRun, mx.array]]) -> list[Choice]:
        """Return the target's tokens after every row, in one call for all rows of equal settings."""
        together: dict[tuple[Any, ...], list[tuple[VerifiedRun, mx.array]]] = {}
        found = []
        for run, rows in logits:
            params, open_window = run.state.params, run.segment.open and not run.segment.continues
            drafts = run.state.drafts_of(run.segment) if params.ratio and open_window else []
            own = run.state.constraint is not None and run.state.needs_host(run.segment)
            settings = None if own or drafts else shared_settings(params)
            if settings is None:
                found.append(Choice([(run, rows.shape[0])], self._targets(run, rows, drafts)))
            else:
                together.setdefault(settings, []).append((run, rows))
        for group in together.values():
            rows = group[0][1] if len(group) == 1 else mx.concatenate([rows for _, rows in group])
            params = group[0][0].state.params
            places = [p for run, r in group for p in _places(run, r)]
            tokens = choose_with_keys(rows, params, partial(key_array, places))
            found.append(Choice([(run, rows.shape[0]) for run, rows in group], tokens))
        return found

    def _targets(self, run: VerifiedRun, logits: mx.array, drafts: Sequence[Draft]) -> mx.array:
        """Return the target's token after each row: int32 `[w]`, lazy. `drafts` are those of the ratio rule."""
        state, segment, rows = run.state, run.segment, logits.shape[0]
        params = state.params
        if state.constraint is not None and state.needs_host(segment):
            logits = state.constraint.mask(logits, state.answer_with(segment.tokens))
        first = segment.position + segment.width - rows + 1
        return choose(logits, params, first, state.history, segment.tokens, drafts)

    def _early_drafts(
        self, normed: mx.array, runs: Sequence[VerifiedRun], targets: Mapping[Key, mx.array]
    ) -> WindowDrafts | None:
        """Return the drafts that the device draws without the host, or None if there are none."""
        jobs = [_window_job(run, normed, targets[run.key]) for run in runs if _drafts_on_device(run)]
        if not jobs or self.drafter is None:
            return None
        if not self.drafter.head.reads_around_holes and any(job.depth > 1 for job in jobs):
            return None
        mx.async_eval(list(targets.values()))  # a GPU computes them while Python builds the drafts
        return WindowDrafts(self.drafter, jobs)


def _unembedding(modules: StageModules) -> Callable[[mx.array], mx.array]:
    """Return lm_head, or the embedding that it is tied to."""
    found: Callable[[mx.array], mx.array] = modules.lm_head
    if found is None:
        assert modules.embed_tokens is not None, "a tied lm_head needs the embedding beside it"
        found = modules.embed_tokens.as_linear
    communicator, config = modules.communicator, modules.config
    is_cut = config.cuts_vocabulary and not config.tie_word_embeddings
    if communicator.size > 1 and modules.lm_head is not None and is_cut:
        return lambda x: communicator.gather(found(x))
    return found


def _places(run: VerifiedRun, logits: mx.array) -> list[tuple[int, int]]:
    """Return the seed and the position that each row predicts."""
    end = run.segment.position + run.segment.width + 1
    return [(run.state.params.seed, p) for p in range(end - logits.shape[0], end)]


def _drafts_on_device(run: VerifiedRun) -> bool:
    """Return whether a window that is no misspeculation asks for drafts without a history or a constraint."""
    segment, state = run.segment, run.state
    sampled = segment.open or segment.sample
    if not segment.drafts or not sampled or segment.continues or state.head is None:
        return False
    if segment.open and state.expected is not None and state.expected != segment.tokens[0]:
        return False
    return not state.needs_host(segment, segment.drafts) and shared_settings(state.params) is not None


def _window_job(run: VerifiedRun, normed: mx.array, targets: mx.array) -> WindowJob:
    segment, state = run.segment, run.state
    assert state.head is not None
    later = segment.tokens[1:]
    return WindowJob(
        run.key,
        state.head,
        segment.drafts,
        segment.position,
        state.params,
        normed[run.start : run.start + segment.width],
        targets,
        segment.tokens[0],
        drafts=later if segment.open else (),
        following=() if segment.open else later,
    )
