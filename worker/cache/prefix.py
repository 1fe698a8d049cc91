"""A prefix entry: one stage's part of the state after some prompt, kept for the next prompt that starts the same."""

from __future__ import annotations

from dataclasses import dataclass

from mtp.attention import copy_of, state_of
from worker.cache.gdn import GDNCache
from worker.cache.sequence import LayerCache
from worker.cache.tail import Tail


@dataclass(frozen=True)
class PrefixEntry:
    """State after `length` tokens. `tail` is what the last stage keeps besides its layers."""

    length: int
    layers: list[LayerCache]
    tail: Tail | None = None

    def copy_layers(self) -> list[LayerCache]:
        """Caches a sequence may write to, the entry staying as it is."""
        return [c.copy() if isinstance(c, GDNCache) else copy_of(c) for c in self.layers]

    @property
    def nbytes(self) -> int:
        total = 0 if self.tail is None else self.tail.nbytes
        for cache in self.layers:
            arrays = cache.arrays() if isinstance(cache, GDNCache) else state_of(cache)
            total += sum(array.nbytes for array in arrays)
        return total
