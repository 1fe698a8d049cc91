"""What a sequence has said so far, counted by token: what penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from proto.errors import ProtocolError

Tokens = Sequence[int] | mx.array
"""Token ids; an array of them need not be evaluated."""


class History:
    """Token counts of one sequence, its prompt's apart from its output's.

    A step costs what it adds, not what is there: counts are two int32 `[vocab]` arrays (2 MB at 248,320 tokens), so
    make one only for a sequence whose params are `penalized`. `prompt` is `Admit.prompt`: the first
    so many tokens are the user's, also when a rebuilt sequence is fed its own output as a prompt.
    """

    def __init__(self, vocab: int, prompt: int) -> None:
        self.vocab = vocab
        self.prompt = prompt
        self._tokens: list[int] = []
        self._in_prompt = mx.zeros([vocab], dtype=mx.int32)
        self._in_output = mx.zeros([vocab], dtype=mx.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises ProtocolError for one outside the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab:
                raise ProtocolError(f"token {token}: the vocabulary has {self.vocab}")
        self._add(tokens, start=len(self), count=1)
        self._tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, as a rollback does."""
        if not 0 <= length <= len(self):
            raise ValueError(f"truncate to {length} of {len(self)} tokens")
        self._add(self._tokens[length:], start=length, count=-1)
        del self._tokens[length:]

    def counts(self, pending: Tokens, rows: int) -> tuple[mx.array, mx.array]:
        """How often each row's past holds each token: (in the prompt, in the output), int32 `[rows, vocab]`.

        `pending` are n >= rows - 1 tokens that follow the history and are not in it yet, an open window or a
        chain of drafts. The last row sees them all, each row
        above it one fewer.
        """
        tokens = token_array(pending)
        unseen = rows - 1
        if tokens.size < unseen:
            raise ValueError(f"{rows} rows need {unseen} pending tokens, got {tokens.size}")
        pairs = [(r, j) for r in range(rows) for j in range(tokens.size - unseen + r)]
        first_output = self.prompt - len(self)
        return (
            _scattered(self._in_prompt, rows, tokens, [p for p in pairs if p[1] < first_output]),
            _scattered(self._in_output, rows, tokens, [p for p in pairs if p[1] >= first_output]),
        )

    def _add(self, tokens: Sequence[int], start: int, count: int) -> None:
        """Add `count` for each of `tokens`, which stand at `start` and after."""
        split = max(0, self.prompt - start)
        self._in_prompt = _added(self._in_prompt, tokens[:split], count)
        self._in_output = _added(self._in_output, tokens[split:], count)


def token_array(tokens: Tokens) -> mx.array:
    """int32 `[n]`"""
    return mx.array(tokens if isinstance(tokens, mx.array) else list(tokens), dtype=mx.int32)


def _added(counts: mx.array, tokens: Sequence[int], count: int) -> mx.array:
    if not tokens:
        return counts
    return counts.at[token_array(tokens)].add(count)


def _scattered(
    counts: mx.array, rows: int, tokens: mx.array, pairs: list[tuple[int, int]]
) -> mx.array:
    """`counts` once a row, and one more for token `tokens[j]` in row r for each pair (r, j)."""
    repeated = mx.broadcast_to(counts, (rows, counts.size))
    if not pairs:
        return repeated
    row, index = mx.array(pairs, dtype=mx.int32).T
    return repeated.at[row, tokens[index]].add(1)
