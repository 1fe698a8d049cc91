"""The limits that the user sets on requests, prompts and frames."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

PIPELINED_CHUNKS = 8
"""Chunks. Minimum number of chunks of a prompt whose chunks stay above SMALLEST_CHUNK.

N stages then prefill the prompt 8 N / (N + 7) times as fast as one stage.
"""

SMALLEST_CHUNK = 128
"""Tokens. Lower bound of a chunk: fewer rows cost a stage almost as much, because it reads all its weights anyway.

This matters most for a mixture of experts.
"""


SHORTEST_CHUNK = 64
"""Tokens. Shortest chunk after a GPU gave up longer ones. Shorter chunks read the weights too often."""


@dataclass(frozen=True)
class Limits:
    """The user's limits. `context` and `vocab` come from the model.

    Up to `queue` requests may wait; None allows as many as suit the plan. A prompt is cut into chunks of at most
    `prefill_chunk` tokens. Chunks of several prompts share a frame of up to `step_tokens` tokens.
    """

    context: int
    vocab: int = 2**31
    queue: int | None = None
    prefill_chunk: int = 512
    step_tokens: int = 2048

    def with_shorter_chunks(self) -> Self | None:
        """Return these limits with chunks of half the length, or None if the chunks are short already."""
        if self.prefill_chunk < 2 * SHORTEST_CHUNK:
            return None
        return replace(
            self, prefill_chunk=self.prefill_chunk // 2, step_tokens=max(1, self.step_tokens // 2)
        )

    def chunk_length(self, prompt: int) -> int:
        """Return the maximum chunk length for a prompt of `prompt` tokens.

        A short prompt is cut into PIPELINED_CHUNKS smaller chunks, because two chunks of 512 tokens leave half of the
        stages idle. The length does not depend on the number of stages: some kernels round differently for another
        number of rows, so the answer would depend on the number of stages.
        """
        return min(self.prefill_chunk, max(SMALLEST_CHUNK, -(-prompt // PIPELINED_CHUNKS)))
