"""The verifier of the last stage: final norm, logits, the target's choice, its comparison with the drafts, new drafts.

Logits never leave this stage. For each window `[t0, d1 … dk]` the target's own token is computed at every row. A draft
is accepted when it equals the target's token (coupled), or passes the ratio test. The hidden states of the accepted
rows are the input of the MTP head, which drafts the next tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from mtp.head.attention import KVFormat
from mtp.head.draft_vocabulary import DraftVocabularySize, draft_vocabulary
from mtp.head.drafter import Drafter
from mtp.head.window_drafts import WindowDrafts, WindowJob
from mtp.sampling.acceptance import ratio_targets
from mtp.sampling.choice import choose, choose_rows, logprobs, shared_settings
from mtp.sampling.filters import filtered
from mtp.sampling.grammar import GrammarState
from mtp.sampling.history import History
from proto.errors import ProtocolError
from proto.frame import Admit, Commit, Outcome, Segment
from proto.frame_stamps import FrameStamps, StageStep
from worker.cache.last_stage_state import ChosenToken, LastStageState
from worker.model.loader import StageModules
from worker.model.stage import Run
from worker.model.verdict import Choice, Key, Verdict, VerifiedRun, key_of


class Verifier:
    """The parts after the layers: norm, lm_head (or tied embedding), and the MTP head if the checkpoint has it."""

    def __init__(
        self,
        modules: StageModules,
        kv_format: KVFormat,
        draft_vocab: DraftVocabularySize | None = None,
    ) -> None:
        assert modules.norm is not None, "this stage is not the last"
        self.norm = modules.norm
        self.vocab = modules.config.vocab_size
        self.exempt = modules.config.eos_token_ids
        self.unembed = _unembedding(modules)
        self.drafter: Drafter | None = None
        if modules.head is not None:
            assert modules.embed_tokens is not None, "a head needs the embedding beside it"
            size = draft_vocab or DraftVocabularySize()
            module = modules.embed_tokens if modules.lm_head is None else modules.lm_head
            part = draft_vocabulary(module, self.unembed, self.vocab, size)
            self.drafter = Drafter(
                modules.head, modules.embed_tokens, self.unembed, kv_format, self.exempt, part
            )
            if size.auto:
                self.drafter.measure_vocabulary()
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

    def begin(
        self, x: mx.array, runs: Sequence[Run], states: Sequence[mx.array], stamps: FrameStamps
    ) -> Verdict:
        """Build the verdict about the segments of `x [rows, hidden]`, and let the device compute it with `states`.

        Raises ProtocolError when drafts are requested and this checkpoint has no head.
        """
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
        drafts = self._early_drafts(normed, verified, targets)
        for choice in choices:
            for run, first, end in choice.split():
                sure = end - first == 1
                run.state.chosen = ChosenToken(choice.tokens, first) if sure else None
        verdict = Verdict(self.drafter, verified, normed, choices, found, drafts)
        stamps.mark(StageStep.BUILT)
        mx.async_eval(verdict.arrays(), *states)
        return verdict

    def _verified_runs(self, runs: Sequence[Run]) -> list[VerifiedRun]:
        verified, start = [], 0
        for _, segment in runs:
            state = self.states[segment.seq_id]
            if segment.continues and state.params.needs_host:
                raise ProtocolError(f"sequence {segment.seq_id} cannot continue by itself")
            verified.append(VerifiedRun(segment, state, start))
            start += segment.width
        return verified

    def next_tokens(self, segments: Sequence[Segment]) -> mx.array:
        """Return the first tokens of segments that continue: int32 `[len(segments)]`, perhaps lazy.

        Raises ProtocolError if a sequence has no choice to continue with, or if the host must see its tokens first.
        """
        chosen = []
        for segment in segments:
            state = self.states[segment.seq_id]
            if state.chosen is None or state.params.needs_host:
                raise ProtocolError(f"sequence {segment.seq_id} cannot continue by itself")
            chosen.append(state.chosen)
        tokens, rows = chosen[0].tokens, [one.row for one in chosen]
        if any(one.tokens is not tokens for one in chosen):
            return mx.concatenate([one.tokens[one.row : one.row + 1] for one in chosen])
        return tokens if rows == list(range(tokens.size)) else tokens[mx.array(rows)]

    def commit(self, op: Commit) -> None:
        """Apply a commit to the state of its sequence."""
        self.states[op.seq_id].commit(op.window, op.accepted_length)

    def outcomes(
        self, segments: Sequence[Segment], decided: Mapping[Key, Outcome]
    ) -> tuple[Outcome, ...]:
        """Return the outcomes in the order of `segments`. A segment that did not run is marked as cancelled."""
        return tuple(
            decided.get(key_of(s)) or Outcome(s.seq_id, s.window, accepted_length=0, cancelled=True)
            for s in segments
        )

    def _logits(
        self, normed: mx.array, runs: Sequence[VerifiedRun]
    ) -> list[tuple[VerifiedRun, mx.array]]:
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
        together: dict[tuple[float, ...], list[tuple[VerifiedRun, mx.array]]] = {}
        found = []
        for run, rows in logits:
            settings = None if run.state.grammar is not None else shared_settings(run.state.params)
            if settings is None or _ratio_applies(run):
                found.append(Choice([(run, rows.shape[0])], self._targets(run, rows)))
            else:
                together.setdefault(settings, []).append((run, rows))
        for group in together.values():
            rows = group[0][1] if len(group) == 1 else mx.concatenate([rows for _, rows in group])
            params = group[0][0].state.params
            tokens = choose_rows(rows, params, [p for run, r in group for p in _places(run, r)])
            found.append(Choice([(run, rows.shape[0]) for run, rows in group], tokens))
        return found

    def _targets(self, run: VerifiedRun, logits: mx.array) -> mx.array:
        """Return the target's token after each row: int32 `[w]`, lazy."""
        state, segment, rows = run.state, run.segment, logits.shape[0]
        params = state.params
        if state.grammar is not None:
            logits = state.grammar.mask(logits, state.answer_with(segment.tokens))
        first = segment.position + segment.width - rows + 1
        drafts, scores = segment.tokens[1:], state.draft_scores
        if scores is None or not _ratio_applies(run):
            return choose(logits, params, first, state.history, segment.tokens, self.exempt)
        target_scores = filtered(logits, params, first, state.history, segment.tokens, self.exempt)
        return ratio_targets(target_scores, scores[: len(drafts)], drafts, params.seed, first)

    def _early_drafts(
        self, normed: mx.array, runs: Sequence[VerifiedRun], targets: Mapping[Key, mx.array]
    ) -> WindowDrafts | None:
        """Return the drafts that the device draws without the host, or None if there are none."""
        jobs = [
            _window_job(run, normed, targets[run.key]) for run in runs if _drafts_on_device(run)
        ]
        if not jobs or self.drafter is None:
            return None
        mx.async_eval(list(targets.values()))  # a GPU computes them while Python builds the drafts
        return WindowDrafts(self.drafter, jobs)


def _unembedding(modules: StageModules) -> Callable[[mx.array], mx.array]:
    """Return lm_head, or the embedding that it is tied to."""
    if modules.lm_head is not None:
        return modules.lm_head
    assert modules.embed_tokens is not None, "a tied lm_head needs the embedding beside it"
    return modules.embed_tokens.as_linear


def _places(run: VerifiedRun, logits: mx.array) -> list[tuple[int, int]]:
    """Return the seed and the position that each row predicts."""
    end = run.segment.position + run.segment.width + 1
    return [(run.state.params.seed, p) for p in range(end - logits.shape[0], end)]


def _ratio_applies(run: VerifiedRun) -> bool:
    """Return whether the tokens of a window depend on its drafts."""
    return run.state.draft_scores is not None and run.segment.open and run.segment.width > 1


def _drafts_on_device(run: VerifiedRun) -> bool:
    """Return whether drafts are requested that depend on neither a history, a grammar nor the ratio rule.

    A misspeculated window gets no drafts.
    """
    segment, state = run.segment, run.state
    sampled = segment.open or segment.sample
    if not segment.drafts or not sampled or segment.continues or state.head is None:
        return False
    if segment.open and state.expected is not None and state.expected != segment.tokens[0]:
        return False
    host = state.params.needs_host or state.params.ratio
    return not host and shared_settings(state.params) is not None


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
