"""Layers whose rows have several residual streams, around any mixer of tokens and any MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from mtp.layers.communicator import Communicator
from mtp.layers.exact import ExactProducts
from mtp.layers.experts import row_experts
from mtp.layers.layer import Hole, KVFormat, Layer, Mixer, Picks, Rows
from mtp.layers.source_kernel import SourceKernel
from mtp.layers.sparse_attention import BlockReader
from proto.errors import UsageError


class Connection(Protocol):
    """The connection of a block: how it reads the streams, and how they go on after it."""

    language: type[SourceKernel] | None
    """The language of the kernels that replace MLX's operations."""

    @property
    def kernel(self) -> tuple[str, str, str, int] | None:
        """The kernel's name, shapes and source, and the width of its rows, as `Picks` takes them. None is no kernel."""

    def read(self, x: mx.array, block: mx.array | None = None, gates: Any = ()) -> tuple[mx.array, mx.array, Any]:
        """Return the streams `x`, the normed input `[rows, hidden]` of the block, and the gates of its output.

        `block` is the output of the block before, which the streams get by its `gates`.
        """

    def spread(self, x: mx.array, block: mx.array, gates: Any) -> mx.array:
        """Return the streams `x` with the output `[rows, hidden]` of the block, by its gates."""


class Residual:
    """One stream, to which a block adds its output."""

    language: type[SourceKernel] | None = None
    kernel = None

    def __init__(self, norm: Callable[[mx.array], mx.array]) -> None:
        self._norm = norm

    def read(self, x: mx.array, block: mx.array | None = None, gates: Any = ()) -> tuple[mx.array, mx.array, Any]:
        """See `Connection.read`."""
        x = x if block is None else x + block
        return x, self._norm(x), ()

    def spread(self, x: mx.array, block: mx.array, gates: Any) -> mx.array:
        """See `Connection.spread`."""
        return x + block


class StreamLayer(Layer):
    """A layer with two connections. Subclasses name the family, which `model` names for people."""

    model: ClassVar[str]
    mixer: Mixer

    def __init__(self, mixer: Mixer, experts: Any, connections: Sequence[Connection], dtype: mx.Dtype) -> None:
        self.mixer, self.experts, self.connections, self.dtype = mixer, experts, connections, dtype

    def new_cache(self, kv_format: KVFormat) -> Any:
        return self.mixer.new_cache(kv_format)

    def share(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def pin_exact(self, products: ExactProducts) -> None:
        raise UsageError(f"--exact is not supported for {self.model}. Leave it out.")

    def take_kernels(self, language: type[SourceKernel], picks: Picks) -> None:
        self.experts = row_experts(self.experts, self.dtype, language, picks)
        if isinstance(self.mixer, BlockReader):
            self.mixer.take_kernels(language, picks)
        if (kernel := self.connections[0].kernel) is None:
            return

        def layer_in(language: type[SourceKernel] | None) -> Rows:
            """Return a layer whose blocks keep their inputs, and whose streams kernels in `language` compute."""

            def run(x: mx.array) -> mx.array:
                for connection in self.connections:
                    connection.language = language
                return self._around(x, lambda inputs: inputs, lambda inputs: inputs)

            return run

        won = picks(*kernel, layer_in(language), layer_in(None))
        for connection in self.connections:
            connection.language = language if won else None

    def forward(
        self,
        x: mx.array,
        caches: Sequence[Any],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        total = self.communicator.sum
        return self._around(
            x,
            lambda inputs: total(self.mixer.mix(inputs, caches, widths, stay_open, holes)),
            lambda inputs: total(self.experts(inputs)),
        )

    def _around(self, x: mx.array, mixed: Rows, expanded: Rows) -> mx.array:
        """Return the streams `x` after both blocks."""
        first, second = self.connections
        x, inputs, gates = first.read(x)
        x, inputs, gates = second.read(x, mixed(inputs), gates)
        return second.spread(x, expanded(inputs), gates)
