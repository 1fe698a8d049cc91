"""The constraint of an answer: a grammar, and the end of its reasoning. Parameters and the answer decide alone."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mtp.sampling.grammar import Answer, GrammarState
from proto.errors import ProtocolError
from proto.params import OPENING_TOKENS, SamplingParams


def closing_tokens(params: SamplingParams, answer: Answer, length: int) -> tuple[int, ...]:
    """Return the tokens that must follow the first `length` tokens of `answer` to close the reasoning, or none.

    Each text that reaches the budget gets them from there on, so a token's place says which one it is.
    """
    budget, end = params.reasoning_budget, params.reasoning_end
    begin = None if budget is None or length < budget else _reasoning_begin(params, answer, length)
    if budget is None or begin is None:
        return ()
    place = length - begin - budget
    if not 0 <= place < len(end) or end[-1] in answer.part(begin, begin + budget):
        return ()
    return end[place:]


def _reasoning_begin(params: SamplingParams, answer: Answer, length: int) -> int | None:
    """Return the place of the first token of the reasoning, or None for an answer without one."""
    if not params.reasoning_start:
        return 0
    opening, *blanks = params.reasoning_start
    for place, token in enumerate(answer.part(0, min(length, OPENING_TOKENS))):
        if token == opening:
            return place + 1
        if token not in blanks:
            break
    return None


@dataclass(frozen=True)
class Constraint:
    """The constraint of one sequence. `grammar` follows its answer."""

    params: SamplingParams
    grammar: GrammarState | None

    @classmethod
    def make(cls, params: SamplingParams, vocabulary: bytes, size: int) -> Constraint | None:
        """Return the constraint at the start of an answer with `size` tokens to choose from, or None without one.

        Raises ProtocolError for a missing vocabulary, and for a token that does not exist.
        """
        grammar = GrammarState.make(params, vocabulary)
        if grammar is None and params.reasoning_budget is None:
            return None
        start = () if params.grammar_start is None else (params.grammar_start,)
        if any(token >= size for token in (*params.reasoning_end, *params.reasoning_stops, *start)):
            raise ProtocolError(f"a token of the reasoning exceeds the vocabulary of {size} tokens")
        return cls(params, grammar)

    def forced(self, answer: Answer) -> list[int]:
        """Return the tokens that must follow `answer`; empty if there is a choice."""
        if closing := closing_tokens(self.params, answer, len(answer)):
            return list(closing)
        return [] if self.grammar is None else self.grammar.forced(answer)

    def mask(self, logits: mx.array, answer: Answer) -> mx.array:
        """Return logits `[w, vocab]` with -inf for the tokens that are not allowed. See `GrammarState.mask`."""
        rows = logits.shape[0]
        lengths = range(len(answer) - rows + 1, len(answer) + 1)
        if self.grammar is not None:
            waits = [self.grammar.waits(answer, length) for length in lengths]
            logits = self.grammar.mask(self._without_stops(logits, waits), answer)
        closing = [closing_tokens(self.params, answer, length) for length in lengths]
        if not any(closing):
            return logits
        only = np.full(logits.shape, -np.inf, np.float32)
        for row, tokens in zip(only, closing, strict=True):
            row[tokens[0] if tokens else slice(None)] = 0.0
        # A closing token gets the logit 0, since the model's own may be -inf.
        free = mx.array([not tokens for tokens in closing])[:, None]
        return mx.where(free, logits, mx.array(only).astype(logits.dtype))

    def _without_stops(self, logits: mx.array, waits: list[bool]) -> mx.array:
        """Return logits in which, in the rows that wait, the end of the reasoning has the chance of the end tokens too.

        The end of the answer there would be an answer without the format that the client requires.
        """
        stops, mark = self.params.reasoning_stops, self.params.grammar_start
        if not stops or mark is None or not any(waits):
            return logits
        scores = logits.astype(mx.float32)
        ends = mx.logsumexp(scores[:, mx.array([mark, *stops])], axis=-1)
        scores[:, mx.array(stops)] = -mx.inf
        scores[:, mark] = ends
        return mx.where(mx.array(waits)[:, None], scores, logits.astype(mx.float32))
