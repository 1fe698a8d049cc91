"""Stages without a model for long runs: layers that hold tokens, a text by formula, drafts, and backups.

They are `token_stages` with the text of `fake_last_stage`, which depends on all tokens before and on the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast
from unittest.mock import patch

from mtp.sampling.sampler import accepted_length
from proto.backup import LayerState
from proto.errors import ProtocolError
from proto.frame import Admit, BackUp, Outcome, RestoreBackup, Segment, TokenLogprob
from tests.support.stages import token_stages
from tests.support.stages.fake_last_stage import VOCAB, target
from worker.cache.sequence_cache import LastStageState, SequenceCache
from worker.engine import stage_engine
from worker.engine.stage_backups import StageBackups
from worker.engine.stage_engine import Budget, StageEngine

RIGHT, OUT_OF = 3, 5
"""Drafts for the first RIGHT of every OUT_OF positions are the target's own."""


@dataclass
class FormulaVerifier(token_stages.TruthfulVerifier):
    """A verifier whose targets are a formula of the tokens that the layers hold."""

    admitted: dict[int, Admit] = field(default_factory=dict)
    states: dict[int, LastStageState] = field(default_factory=dict)
    """Always empty: the tokens held decide about the next one."""

    def admit(self, op: Admit) -> None:
        """Add a sequence."""
        super().admit(op)
        self.admitted[op.seq_id] = op

    def evict(self, seq_id: int) -> None:
        """Forget a sequence."""
        super().evict(seq_id)
        self.admitted.pop(seq_id, None)

    def _outcome(self, sequence: SequenceCache, segment: Segment) -> Outcome:
        if not (segment.open or segment.sample):
            return Outcome(segment.seq_id, segment.window, segment.width)
        params = self.admitted[segment.seq_id].params
        held = token_stages.tokens_of(sequence)
        ends = range(segment.position + 1, segment.position + segment.width + 1)
        targets = [target(held[:end], params.seed) for end in ends]
        count = segment.width
        if segment.open and not segment.continues:
            count = accepted_length(segment.tokens, targets, self.expected[segment.seq_id])
        if not count:
            return Outcome(segment.seq_id, segment.window, 0)
        token = self.expected[segment.seq_id] = targets[count - 1]
        text = [*held[: segment.position + count], token]
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None:
            chosen = segment.tokens[1:count] if segment.open else ()
            logprobs = tuple(TokenLogprob(t, -float(t)) for t in (*chosen, token))
        drafts = _drafts(text, segment.drafts, params.seed)
        return Outcome(segment.seq_id, segment.window, count, token, drafts, logprobs)


def _drafts(text: list[int], count: int, seed: int) -> tuple[int, ...]:
    drafts: list[int] = []
    for _ in range(count):
        miss = (len(text) + len(drafts)) % OUT_OF >= RIGHT
        drafts.append((target([*text, *drafts], seed) + miss) % VOCAB)
    return tuple(drafts)


@dataclass(frozen=True)
class TokenBackup:
    """The states of all layers of a stage after `length` tokens."""

    length: int
    states: list[LayerState]


class TokenBackups(StageBackups):
    """Backups of layers that hold tokens, with the rules of `StageBackups`."""

    def make_backup(self, op: BackUp, sequence: SequenceCache, last: LastStageState | None) -> None:
        """Back up a sequence: the new tokens for even layers, and all tokens for odd ones."""
        stack = sequence.stack
        if stack.windows or op.start > stack.length:
            raise ProtocolError(f"sequence {op.seq_id} cannot be backed up from token {op.start}")
        tokens = token_stages.tokens_of(sequence)
        assert len(tokens) == stack.length
        new, whole = (json.dumps(part).encode() for part in (tokens[op.start :], tokens))
        states = [
            LayerState(layer, False, whole) if layer % 2 else LayerState(layer, True, new)
            for layer in self.span
        ]
        cast(dict[int, TokenBackup], self.made)[op.seq_id] = TokenBackup(stack.length, states)

    def restore_backup(
        self, op: RestoreBackup, sequence: SequenceCache, last: LastStageState | None
    ) -> None:
        """Fill the empty layers of a sequence."""
        backup = self.received.pop(op.seq_id, None)
        if backup is None or sequence.stack.length or len(backup.tokens) != op.length:
            raise ProtocolError(f"sequence {op.seq_id} has no backup of {op.length} tokens here")
        for layer in self.span:
            parts = [json.loads(data) for (data,) in cast(list[tuple[bytes]], backup.layers[layer])]
            tokens = [token for part in parts for token in part]
            assert tokens == list(backup.tokens), "a backup has other tokens"
        cache, state = token_stages.layers_of(sequence.layers)
        cache.tokens, state.seen = list(backup.tokens), backup.tokens
        sequence.stack.length = op.length


def formula_engine(
    stage: token_stages.TokenStage, epoch: int, *, first: bool, last: bool, budget: Budget
) -> StageEngine:
    """Return the engine of a stage in a new plan. The two layers of the stage stand for all layers of its span."""
    verifier = FormulaVerifier(token_stages.Chooser()) if last else None
    engine = StageEngine(stage, epoch=epoch, first=first, verifier=verifier, budget=budget)
    engine.backups = TokenBackups(stage.modules.span, stage.modules.config)
    return engine


@contextmanager
def formula_copies() -> Iterator[None]:
    """Let engines copy layers that hold tokens for their prefix entries."""
    with patch.object(stage_engine, "copies_of", token_stages.copies):
        yield
