"""One sequence on one stage: its window stack and the caches of its layers, which change together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mtp.head.attention import KV, copy_of, state_of
from proto.errors import ProtocolError
from proto.frame import Admit, Segment
from worker.cache.gdn_cache import GDNCache
from worker.cache.snapshot_gdn_cache import SnapshotGDNCache
from worker.cache.window_stack import NOTHING, CommitResult, WindowStack

StateCache = GDNCache | SnapshotGDNCache
LayerCache = KV | StateCache


@dataclass
class SequenceCache:
    """The state of one sequence on this stage. `layers[i]` belongs to the i-th layer of the span."""

    admitted: Admit
    layers: list[LayerCache]
    stack: WindowStack = field(default_factory=WindowStack)

    def extend(self, segment: Segment) -> None:
        """Register a segment before it runs. The layers append its rows to the caches themselves.

        Raises ProtocolError when the segment does not follow the end of the sequence or exceeds the admitted capacity.
        """
        if self.stack.length + segment.width > self.admitted.capacity:
            raise ProtocolError(
                f"{segment.width} tokens at {segment.position} exceed the capacity of {self.admitted.capacity}"
                f" tokens of sequence {segment.seq_id}"
            )
        self.stack.extend(segment.window, segment.position, segment.width, stays_open=segment.open)

    def commit(self, window: int, accepted_length: int, *, in_header: bool) -> CommitResult:
        """Apply a commit to the window stack and to the cache of every layer."""
        result = self.stack.commit(window, accepted_length, in_header=in_header)
        if result is NOTHING:
            return result
        for cache in self.layers:
            if isinstance(cache, StateCache):
                cache.apply_commit(result.whole, result.cut)
            elif result.trim:
                cache.trim(result.trim)
        return result

    def arrays(self) -> Iterator[mx.array]:
        """Return every array of the present state, without the tapes of open windows."""
        return arrays_of(self.layers)

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the keys and values."""
        caches = (cache for cache in self.layers if not isinstance(cache, StateCache))
        return sum(array.nbytes for cache in caches for array in state_of(cache))

    @property
    def nbytes(self) -> int:
        """Bytes of the present state."""
        return sum(
            cache.nbytes
            if isinstance(cache, StateCache)
            else sum(a.nbytes for a in state_of(cache))
            for cache in self.layers
        )


def arrays_of(layers: Sequence[LayerCache]) -> Iterator[mx.array]:
    """Yield every array of the present state of the caches."""
    for cache in layers:
        yield from cache.arrays() if isinstance(cache, StateCache) else state_of(cache)


def copies_of(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Return independent copies of the caches. No window may be open."""
    return [c.copy() if isinstance(c, StateCache) else copy_of(c) for c in layers]
