"""A prefix entry: one stage's part of the state after some prompt, kept for the next prompt that starts the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from worker.cache.last_stage_state import Tail
from worker.cache.sequence_cache import LayerCache, arrays_of


@dataclass(frozen=True)
class PrefixEntry:
    """State after `length` tokens. `tail` is what the last stage keeps besides its layers."""

    length: int
    layers: list[LayerCache]
    tail: Tail | None = None

    def arrays(self) -> Iterator[mx.array]:
        """Every array of the entry."""
        yield from arrays_of(self.layers)
        if self.tail is not None and self.tail.head is not None:
            yield from self.tail.head.arrays()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())
