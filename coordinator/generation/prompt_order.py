"""The order in which prompts are computed: fair between clients, short prompts first, and no prompt waits forever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from coordinator.generation.sequence import Sequence

OTHER_FRAMES = 3
"""Prompt frames in a row without the oldest prompt. The next one begins with it, so it gets a quarter at least."""

SHORT_PROMPT = 128
"""Tokens. Prompts up to this length count as equally short, and the oldest of them is first."""


class PromptOrder:
    """The order of prompts, admitted or waiting.

    Answers that a failure has interrupted come first. Then comes the client with the fewest admitted sequences. Among
    its prompts the shortest rest is first, by powers of two, and the older one of equals.
    """

    def __init__(self) -> None:
        self.other_frames = 0
        """Prompt frames since the oldest prompt was part of one, up to OTHER_FRAMES."""

    def sort_prompts(
        self, prompts: Iterable[Sequence], running: Mapping[int, Sequence]
    ) -> list[Sequence]:
        """Return `prompts` in the order in which the next frame takes them. `running` are all admitted sequences."""
        admitted = Counter(sequence.request.client for sequence in running.values())
        chosen = sorted(prompts, key=lambda sequence: _key(sequence, admitted))
        if chosen and self.other_frames >= OTHER_FRAMES:
            oldest = min(chosen, key=lambda sequence: sequence.seq_id)
            chosen.remove(oldest)
            chosen.insert(0, oldest)
        return chosen

    def record_frame(self, computed: Collection[Sequence], prompts: Iterable[Sequence]) -> None:
        """Record that a frame carries chunks of the prompts `computed`. `prompts` are these and all that wait."""
        oldest = min(prompts, key=lambda sequence: sequence.seq_id)
        served = any(sequence is oldest for sequence in computed)
        self.other_frames = 0 if served else min(OTHER_FRAMES, self.other_frames + 1)


def _key(sequence: Sequence, admitted: Counter[str]) -> tuple[bool, int, int, int]:
    rest = max(SHORT_PROMPT, sequence.prompt_left)
    return (
        not sequence.emitted,
        admitted[sequence.request.client],
        (rest - 1).bit_length(),
        sequence.seq_id,
    )
