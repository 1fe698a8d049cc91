"""The exchange of partial results between the machines that share a stage.

A member of a group holds some of the heads and columns of each layer. A product whose inputs are cut gives a partial
sum, and the sum over all members is the result. Every member must ask for the same sums in the same order, or a
collective waits without end. `FrameEngine` sees to that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from operator import add

import mlx.core as mx


class Communicator(ABC):
    """The members of a group, as the layers of one of them see it."""

    rank: int
    """Number of this member, from 0. The first member decides what all of them compute."""
    size: int
    """Members of the group."""
    can_overlap = False
    """True if sums may run beside products. In exact mode the rows of a prompt's chunk stay together."""
    recorded: list[tuple[mx.array, mx.array]] | None = None
    """The parts and the results of the sums of some rows, while a list is here. Those sums run beside products."""

    @abstractmethod
    def sum(self, x: mx.array) -> mx.array:
        """Return the sum of the partial results `x` of all members, with equal bits on each."""

    @abstractmethod
    def gather(self, x: mx.array) -> mx.array:
        """Return `x [rows, columns]` of all members side by side: `[rows, size * columns]`."""

    @abstractmethod
    def stack(self, x: mx.array) -> mx.array:
        """Return `x [n, …]` of all members after each other: `[size * n, …]`."""


class Alone(Communicator):
    """One machine that holds the whole stage."""

    rank, size = 0, 1

    def sum(self, x: mx.array) -> mx.array:
        return x

    def gather(self, x: mx.array) -> mx.array:
        return x

    def stack(self, x: mx.array) -> mx.array:
        return x


ALONE = Alone()


class GroupCommunicator(Communicator):
    """A group of processes, joined by one of MLX's backends.

    With `exact` a sum is that of the gathered parts in the order of the members. Otherwise the backend chooses the
    order, which depends on the number of bytes. `beside` is the stream of recorded sums, where MLX's default stream for
    them is that of the products.
    """

    def __init__(self, group: mx.distributed.Group, *, exact: bool = False, beside: mx.Stream | None = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.can_overlap = not exact
        self._group, self._exact, self.beside = group, exact, beside

    def sum(self, x: mx.array) -> mx.array:
        if self._exact:
            return reduce(add, self._parts(x))
        if self.recorded is None:
            return mx.distributed.all_sum(x, group=self._group)
        total: mx.array = mx.distributed.all_sum(x, group=self._group, stream=self.beside)
        self.recorded.append((x, total))
        return total

    def gather(self, x: mx.array) -> mx.array:
        return mx.concatenate(self._parts(x), axis=-1)

    def stack(self, x: mx.array) -> mx.array:
        gathered: mx.array = mx.distributed.all_gather(x, group=self._group)
        return gathered

    def _parts(self, x: mx.array) -> list[mx.array]:
        """Return `x` of each member, in their order."""
        return [*mx.split(self.stack(x), self.size)]
