"""A prefix entry: the state of one stage after a prompt, for later prompts that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from worker.cache.last_stage_state import LastStageState
from worker.cache.sequence_cache import LayerCache, arrays_of


@dataclass(frozen=True)
class PrefixEntry:
    """The state after `length` tokens. `last_stage` is the state of the last stage besides its layers."""

    length: int
    layers: list[LayerCache]
    last_stage: LastStageState | None = None

    def arrays(self) -> Iterator[mx.array]:
        """Yield every array of the entry."""
        yield from arrays_of(self.layers)
        if self.last_stage is not None and self.last_stage.head is not None:
            yield from self.last_stage.head.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes of the entry."""
        return sum(array.nbytes for array in self.arrays())
