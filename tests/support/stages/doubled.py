"""A member of a group of two whose other member has the same results, in one process."""

from __future__ import annotations

import mlx.core as mx

from mtp.layers.communicator import Communicator


class Doubled(Communicator):
    """A communicator whose sums are twice the member's own parts. It counts them."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sums = 0

    def sum(self, x: mx.array) -> mx.array:
        self.sums += 1
        return x + x

    def gather(self, x: mx.array) -> mx.array:
        return mx.concatenate([x, x], axis=-1)

    def stack(self, x: mx.array) -> mx.array:
        return mx.concatenate([x, x])
