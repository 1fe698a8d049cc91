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


@dataclass(frozen=True)
class UnconfirmedToken:
    """The token of a window that continues: the text may have ended before it, which only the coordinator knows.

    `hidden [1, hidden]` is its state after the final norm, `successor` the target's choice after it.
    """

    window: int
    token: int
    hidden: mx.array
    successor: int


@dataclass(frozen=True)
class ChosenToken:
    """The target's newest choice as row `row` of `tokens`, int32 `[rows]`, which may be lazy."""

    tokens: mx.array
    row: int


@dataclass
class LastStageState:
    """The state of a sequence on the last stage besides its layers.

    `tokens` are the verified ones. `expected` is the target's choice for the next position: a window with another first
    token is a misspeculation. `chosen` is the same choice on the device, before the host has read it. `draft_scores`
    belong to the newest drafts.
    """

    admitted: Admit
    head: HeadState | None
    tokens: list[int] = field(default_factory=list)
    history: History | None = None
    expected: int | None = None
    chosen: ChosenToken | None = None
    unconfirmed: list[UnconfirmedToken] = field(default_factory=list)
    """Tokens of windows that continue and whose commit has not arrived."""
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

    def commit(self, window: int, accepted_length: int) -> None:
        """Append the unconfirmed tokens before `window`, and its own if it is accepted. Drop the others."""
        end = window + 1 if accepted_length else window
        confirmed = [token for token in self.unconfirmed if token.window < end]
        for token in confirmed:
            self.append_tokens([token.token])
            if self.head is not None:
                self.head.add_pairs(token.hidden, [token.token], token.successor)
        del self.unconfirmed[: len(confirmed)]
        if self.unconfirmed and not accepted_length:
            self.unconfirmed.clear()
            self.chosen = self.expected = None
