"""A prefix entry: one stage's part of the state after some prompt, kept for the next prompt that starts the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from worker.cache.last_stage_state import LastStageState
from worker.cache.sequence_cache import LayerCache, arrays_of


@dataclass(frozen=True)
class PrefixEntry:
    """State after `length` tokens. `last_stage` is what the last stage keeps besides its layers."""

    length: int
    layers: list[LayerCache]
    last_stage: LastStageState | None = None

    def arrays(self) -> Iterator[mx.array]:
        """Every array of the entry."""
        yield from arrays_of(self.layers)
        if self.last_stage is not None and self.last_stage.head is not None:
            yield from self.last_stage.head.arrays()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())
