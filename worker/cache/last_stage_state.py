"""What the last stage keeps of a sequence besides its layers: its tokens, its head, what it expects next."""

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
    """What the last stage keeps of a sequence besides its layers.

    `tokens` are the verified ones. `expected` is the target's choice for the next position: a window whose first
    token differs was built on a vain hope. `draft_scores` belong to the drafts last handed out.
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
        return self.admitted.params

    @property
    def nbytes(self) -> int:
        return 0 if self.head is None else sum(a.nbytes for a in self.head.arrays())

    def take(self, tokens: Sequence[int]) -> None:
        """Verified tokens join the sequence."""
        if self.history is not None:
            self.history.extend(tokens)
        self.tokens.extend(tokens)
