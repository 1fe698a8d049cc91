"""One sequence on one stage: its window state machine and its layers' caches, kept in step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mtp.head.attention import KV, copy_of, state_of
from proto.errors import ProtocolError
from proto.frame import Admit, Segment
from worker.cache.gdn_cache import GDNCache
from worker.cache.snapshot_gdn_cache import SnapshotGDNCache
from worker.cache.window_stack import NOTHING, Settled, WindowStack

StateCache = GDNCache | SnapshotGDNCache
LayerCache = KV | StateCache


@dataclass
class SequenceCache:
    """What this stage holds of a sequence: `layers[i]` belongs to the span's i-th layer."""

    admitted: Admit
    layers: list[LayerCache]
    stack: WindowStack = field(default_factory=WindowStack)

    def extend(self, segment: Segment) -> None:
        """Register a segment that is about to run; its rows are appended by the layers themselves.

        Raises ProtocolError when it does not fit the sequence's end or goes beyond what was admitted.
        """
        if self.stack.length + segment.width > self.admitted.capacity:
            raise ProtocolError(
                f"{segment.width} tokens at {segment.position} are more than the {self.admitted.capacity}"
                f" that sequence {segment.seq_id} was admitted with"
            )
        self.stack.extend(segment.window, segment.position, segment.width, stays_open=segment.open)

    def commit(self, window: int, accepted_length: int, *, in_header: bool) -> Settled:
        """Apply a commit to the state machine and to every layer's cache."""
        settled = self.stack.commit(window, accepted_length, in_header=in_header)
        if settled is NOTHING:
            return settled
        for cache in self.layers:
            if isinstance(cache, StateCache):
                cache.settle(settled.whole, settled.cut)
            elif settled.trim:
                cache.trim(settled.trim)
        return settled

    def arrays(self) -> Iterator[mx.array]:
        """Every array of the present state; open windows' tapes are not among them."""
        return arrays_of(self.layers)

    @property
    def nbytes(self) -> int:
        return sum(
            cache.nbytes
            if isinstance(cache, StateCache)
            else sum(a.nbytes for a in state_of(cache))
            for cache in self.layers
        )


def arrays_of(layers: Sequence[LayerCache]) -> Iterator[mx.array]:
    """Every array of the caches' present state."""
    for cache in layers:
        yield from cache.arrays() if isinstance(cache, StateCache) else state_of(cache)


def copies_of(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Caches of the same state that may be written to on their own. No window may be open."""
    return [c.copy() if isinstance(c, StateCache) else copy_of(c) for c in layers]
