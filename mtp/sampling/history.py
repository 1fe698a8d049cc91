"""The token counts of a sequence, which penalties use."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from proto.errors import ProtocolError

Tokens = Sequence[int] | mx.array
"""Token ids. An array of them may be lazy."""


class History:
    """The token counts of one sequence, separate for prompt and output.

    The cost of a step depends on the new tokens only. The counts are two int32 `[vocab]` arrays (2 MB at 248,320
    tokens), so construct a history only for a sequence whose params are `penalized`. The first `prompt` tokens
    (`Admit.prompt`) are the user's, also in a rebuilt sequence whose output is part of its new prompt.
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
                raise ProtocolError(f"token {token} exceeds the vocabulary of {self.vocab} tokens")
        self._add(tokens, start=len(self), count=1)
        self._tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first `length`, as a rollback does. Raises ValueError for an invalid length."""
        if not 0 <= length <= len(self):
            raise ValueError(f"truncate to {length} of {len(self)} tokens")
        self._add(self._tokens[length:], start=length, count=-1)
        del self._tokens[length:]

    def counts(self, pending: Tokens, rows: int) -> tuple[mx.array, mx.array]:
        """Return the token counts in the past of each row: (in the prompt, in the output), int32 `[rows, vocab]`.

        `pending` are n >= rows - 1 tokens that follow the history and are not part of it yet: an open window or a
        chain of drafts. The past of the last row includes all of them, and that of each row before it one fewer. Raises
        ValueError for fewer tokens.
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
        """Add `count` for each of `tokens`, whose positions begin at `start`."""
        split = max(0, self.prompt - start)
        self._in_prompt = _added(self._in_prompt, tokens[:split], count)
        self._in_output = _added(self._in_output, tokens[split:], count)


def token_array(tokens: Tokens) -> mx.array:
    """Return `tokens` as int32 `[n]`."""
    return mx.array(tokens if isinstance(tokens, mx.array) else list(tokens), dtype=mx.int32)


def _added(counts: mx.array, tokens: Sequence[int], count: int) -> mx.array:
    if not tokens:
        return counts
    return counts.at[token_array(tokens)].add(count)


def _scattered(
    counts: mx.array, rows: int, tokens: mx.array, pairs: list[tuple[int, int]]
) -> mx.array:
    """Repeat `counts` for each row, and add one for `tokens[j]` in row r for each pair (r, j)."""
    repeated = mx.broadcast_to(counts, (rows, counts.size))
    if not pairs:
        return repeated
    row, index = mx.array(pairs, dtype=mx.int32).T
    return repeated.at[row, tokens[index]].add(1)
