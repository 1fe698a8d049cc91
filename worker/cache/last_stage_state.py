"""The state of a sequence on the last stage besides its layers: its tokens, its head, and the expected token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mtp.head.drafter import HeadState
from mtp.sampling.grammar import GrammarState
from mtp.sampling.history import History
from proto.frame import Admit
from proto.params import SamplingParams


@dataclass
class LastStageState:
    """The state of a sequence on the last stage besides its layers.

    `tokens` are the verified ones. `expected` is the target's choice for the next position: a window with another first
    token is a misspeculation. `draft_scores` belong to the newest drafts.
    """

    admitted: Admit
    head: HeadState | None
    tokens: list[int] = field(default_factory=list)
    history: History | None = None
    expected: int | None = None
    draft_scores: mx.array | None = None
    grammar: GrammarState | None = None

    def answer_with(self, tokens: Sequence[int]) -> list[int]:
        """Return the answer, which begins after the prompt: the verified tokens and then `tokens`."""
        return [*self.tokens, *tokens][self.admitted.prompt :]

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return self.admitted.params

    @property
    def nbytes(self) -> int:
        """Bytes of the head's state."""
        return 0 if self.head is None else sum(a.nbytes for a in self.head.arrays())

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Append verified tokens to the sequence and to its history."""
        if self.history is not None:
            self.history.extend(tokens)
        self.tokens.extend(tokens)
