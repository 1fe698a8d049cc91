"""The interface of a layer, of the state it keeps for a sequence, and of an MLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.exact import ExactProducts
from mtp.layers.source_kernel import SourceKernel
from proto.errors import ProtocolError
from proto.images import ImageLayout

REFERENCE = "reference"
"""The kind of the layers that run mlx-lm's modules."""


@dataclass(frozen=True)
class KVFormat:
    """The format of stored K/V. `bits` None is the model's dtype; 4 and 8 quantize in groups along head_dim."""

    bits: int | None = None
    group_size: int = 64

    @classmethod
    def of(cls, head_dim: int, bits: int | None) -> KVFormat:
        """Return the format with the widest groups that divide a head: 64, or 32 for narrower heads."""
        return cls(bits, group_size=32 if head_dim % 64 else 64)


@dataclass(frozen=True)
class Hole:
    """The rejected rows of a window, which stay in a cache until the host knows how many there are.

    They are the `count` entries before `end`, at most `most` of them. `count` is int32 `[1]`, lazy. A new row has its
    position as if they were removed.
    """

    end: int
    count: mx.array
    most: int

    def visible(self, entries: int) -> mx.array:
        """Return which of the first `entries` of the cache stay: bool `[entries]`."""
        places = mx.arange(entries)
        return (places < self.end - self.count) | (places >= self.end)

    def entries(self, places: mx.array) -> mx.array:
        """Return the entries of the cache, int32, at `places` of the text."""
        places = places.astype(mx.int32)
        return mx.where(places < self.end - self.count, places, places + self.count)


@dataclass(frozen=True)
class Member:
    """Member `rank` of the `size` members that hold a layer together.

    `kv_heads` are the heads of keys and values of the whole layer. Of more members than heads, neighbours share one.
    """

    rank: int = 0
    size: int = 1
    kv_heads: int = 1


@dataclass(frozen=True)
class CutAxis:
    """The axis along which the members of a group divide an array of a state, as they divide the weights.

    Each of the `sections` of the axis, whose relative sizes are given, is divided on its own. `shared` heads are those
    of keys and values.
    """

    axis: int
    sections: tuple[int, ...] = (1,)
    shared: bool = False

    def own_part(self, parts: Sequence[mx.array], member: Member) -> mx.array:
        """Return the part of `member` of the array whose `parts` the members of any group hold. Raises ValueError."""
        if self.shared:
            heads = member.kv_heads
            whole = mx.concatenate(list(parts[:: max(1, len(parts) // heads)]), axis=self.axis)
            first, count = member.rank * heads // member.size, max(1, heads // member.size)
            return mx.split(whole, [first, first + count], axis=self.axis)[1]
        total = sum(self.sections)
        ends = [end * parts[0].shape[self.axis] // total for end in accumulate(self.sections)]
        sections = zip(*(mx.split(part, ends[:-1], axis=self.axis) for part in parts), strict=True)
        wholes = [mx.concatenate(list(section), axis=self.axis) for section in sections]
        own = [mx.split(whole, member.size, axis=self.axis)[member.rank] for whole in wholes]
        return own[0] if len(own) == 1 else mx.concatenate(own, axis=self.axis)


HEADS = CutAxis(1)
"""The axis of arrays `[1, heads, …]`."""

KV_HEADS = CutAxis(1, shared=True)
"""The axis of keys and values `[1, kv_heads, …]`."""


class LayerCache(ABC):
    """The state of one sequence in one layer."""

    layout: ImageLayout | None
    """The images of the sequence, which only attention reads."""

    coming: npt.NDArray[np.int64] | None = None
    """The tokens of the rows that run next, for a layer that reads them."""

    @abstractmethod
    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        """Make `whole` open windows permanent. With `cut`, keep `cut` tokens of the next one, and drop all later ones.

        `trim` tokens are removed from the end of the sequence in total.
        """

    @abstractmethod
    def copy(self) -> Self:
        """Return an independent copy in its own memory. No window may be open."""

    def copied_nbytes(self, rows: int) -> int:
        """Return the bytes that a frame of `rows` rows copies if unfinished work reads them."""
        return 0

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Return the arrays of the present state, for `mx.eval` and for counting bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the present state, with the room that its arrays have for more tokens."""
        return sum(array.nbytes for array in self.arrays())

    appends: ClassVar[bool] = False
    """True if tokens only add to the state, so that a backup continues the one before it."""

    @abstractmethod
    def backup_arrays(self, start: int, end: int | None = None) -> list[mx.array]:
        """Return copies of the state for a backup.

        Where the state `appends`, they are those of the tokens `start` to `end`, which no later token changes. So they
        may be read later. Otherwise they are the whole state now.
        """

    @abstractmethod
    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> Self:
        """Return this empty cache with the arrays of its backups in `states`, the oldest first, after `length` tokens.

        Raises ProtocolError for arrays of another number, shape or type.
        """

    @property
    @abstractmethod
    def cut_axes(self) -> tuple[CutAxis | None, ...]:
        """Cuts of the arrays of `backup_arrays` in a group. Every member holds the whole of an array with None."""

    def own_share(self, shares: Sequence[Sequence[mx.array]], member: Member) -> Sequence[mx.array]:
        """Return the share of `member` of a state that the members of any group made. Raises ProtocolError."""
        if len(shares) == member.size:
            return shares[member.rank]
        try:
            own = []
            for axis, parts in zip(self.cut_axes, zip(*shares, strict=True), strict=True):
                if axis is None and any(part.shape != parts[0].shape for part in parts):
                    raise ValueError(f"shapes {[part.shape for part in parts]} of one array")
                own.append(parts[0] if axis is None else axis.own_part(parts, member))
        except ValueError as error:
            raise ProtocolError(f"the shares of a backup do not fit together: {error}") from error
        return own


def checked_state(found: Sequence[mx.array], held: Sequence[mx.array]) -> Sequence[mx.array]:
    """Return `found` if it has the shapes and types of `held`. Raises ProtocolError otherwise."""
    if [(a.shape, a.dtype) for a in found] != [(a.shape, a.dtype) for a in held]:
        raise ProtocolError("the backup of a GDN layer has another shape or type")
    return found


class Layer(ABC):
    """A decoder layer of the model over flat rows of many sequences: norm, attention or GDN, norm, MLP."""

    kind: ClassVar[str]
    """The variant, as logs and the status name it."""
    dtype: mx.Dtype
    """Type of the activations."""
    communicator: Communicator = ALONE
    """The members that share the layer. Each holds some of its heads and columns."""
    mlp: MLP
    mixer: Mixer | None = None
    """The mixer of tokens within a layer of another family, which a variant of a device may replace or fuse."""

    def share(self, communicator: Communicator) -> None:
        """Let the layer be that of one member: add the partial results of all of them after both of its halves."""
        self.communicator = self.mlp.communicator = communicator

    @abstractmethod
    def new_cache(self, kv_format: KVFormat) -> Any:
        """Return the empty cache of a new sequence, a LayerCache of this variant."""

    def enter(self, x: mx.array, sequences: Sequence[Sequence[Any]], widths: Sequence[int]) -> None:
        """Prepare all layers of a stage, of which this is the first, for the rows `x`, with each sequence's caches."""
        return

    @abstractmethod
    def forward(
        self,
        x: mx.array,
        caches: Sequence[Any],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """Return `x [rows, hidden]` after the layer. Sequence i owns the next `widths[i]` rows.

        Advances each cache, which is one of `new_cache`. A window that stays open can be cut down later; attention
        layers do not need `stay_open`. If there are `holes`, which only attention layers have, every cache has one, and
        every width is 1.
        """

    def expect_tokens(self, chunks: Sequence[npt.NDArray[np.int64]]) -> None:
        """Prepare for chunks of prompts that come next, in a layer that reads the tokens of its rows."""
        return

    def take_kernels(self, language: type[SourceKernel], picks: Picks) -> None:
        """Let kernels in `language` compute the parts that `picks` allows, in a layer that no variant replaces."""
        return

    def pin_exact(self, products: ExactProducts) -> None:
        """Keep the bits of every row independent of the rows beside it. A stage in exact mode has layers that can."""
        raise NotImplementedError(f"{self.kind} layers have no exact mode")


Rows = Callable[[mx.array], mx.array]
"""A function of rows that keeps their width."""


Picks = Callable[[str, str, str, int, Rows, Rows], bool]
"""A decision over a kernel, by its name, shapes and source, the width of its rows, and functions with it and without.

It returns whether to use the kernel.
"""


class Mixer(Protocol):
    """The part of a layer that mixes tokens, without the layer around it."""

    def new_cache(self, kv_format: KVFormat) -> Any:
        """See `Layer.new_cache`."""

    def mix(
        self,
        inputs: mx.array,
        caches: Sequence[Any],
        widths: Sequence[int],
        stay_open: Sequence[bool],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """Return the outputs for normalized `inputs [rows, hidden]`, and advance the caches, as `Layer.forward`."""


class MLP(Protocol):
    """The MLP of a layer with its residual."""

    communicator: Communicator
    """The members that share the MLP."""

    def add_output(self, x: mx.array, norm: Callable[[mx.array], mx.array]) -> mx.array:
        """Return `x [rows, hidden]` plus the MLP of its norm."""

    def pin_exact(self, products: ExactProducts) -> None:
        """Keep the bits of every row independent of the rows beside it."""


class PlainMLP:
    """An MLP, dense or of experts, that is any module."""

    communicator: Communicator = ALONE

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def add_output(self, x: mx.array, norm: Callable[[mx.array], mx.array]) -> mx.array:
        y: mx.array = x + self.communicator.sum(self.module(norm(x)))
        return y

    def pin_exact(self, products: ExactProducts) -> None:
        self.module = products.replaced(self.module)


@dataclass(frozen=True)
class KernelTrial:
    """The trial of a kernel: seconds of a step with it and with MLX's operations, over several batches.

    With a `problem` the kernel fails or differs.
    """

    own: float = 0.0
    mlx: float = 0.0
    problem: str = ""

    @property
    def is_won(self) -> bool:
        """True if the kernel is right and not slower."""
        return not self.problem and self.own <= self.mlx


TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
"""Largest norm of the difference over the norm of the result. Both round to `dtype` at different places."""


def difference(own: mx.array, replaced: mx.array, tolerance: float) -> str:
    """Return how the results differ if they do so by more than the tolerance, or an empty string."""
    own, replaced = own.astype(mx.float32), replaced.astype(mx.float32)
    apart, norm = mx.linalg.norm((own - replaced).reshape(-1)), mx.linalg.norm(replaced.reshape(-1))
    if (apart <= tolerance * norm).item():  # not for NaN
        return ""
    return f"its results differ by {apart.item():.2g} where their norm is {norm.item():.2g}"
