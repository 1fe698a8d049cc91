"""A decoder layer around the kernel for GatedDeltaNet windows, compiled as a whole for few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.communicator import Communicator
from mtp.layers.exact import ExactProducts
from mtp.layers.gdn_windows import (
    Recurrence,
    SnapshotGDNCache,
    Snapshots,
    gather_windows,
    kept_rows,
    next_windows,
    record_windows,
)
from mtp.layers.layer import MLP, Hole, KVFormat, Layer
from mtp.layers.linear import compiled


class Ends(Protocol):
    """The products of a layer before and after its mixer. They are hashable; all arrays are arguments.

    So layers of one shape share one trace of `mx.compile`. Subclasses are frozen dataclasses.
    """

    most_rows: int
    """Rows up to which a layer is compiled. Each number of rows is traced once."""

    def project(self, x: mx.array, arguments: Any) -> mx.array:
        """Return the input projections of the norm of `x [rows, hidden]`."""

    def finish(self, x: mx.array, y: mx.array, arguments: Any) -> mx.array:
        """Return `x` plus the output projection of `y`, and plus the MLP if it is among the arguments."""


@dataclass(frozen=True, eq=False)
class EndArguments:
    """The arguments of `project` and `finish`. `has_mlp` if those of `finish` have the MLP."""

    project: Any
    finish: Any
    has_mlp: bool


class WindowLayer(Layer):
    """A GatedDeltaNet layer whose windows are one launch between its projections. A rollback changes only a number."""

    def __init__(
        self,
        kind: str,
        layer: DecoderLayer,
        recurrence: Recurrence,
        dtype: mx.Dtype,
        mlp: MLP,
        ends: Any,
        few: EndArguments | None,
        many: EndArguments,
        pinned: Sequence[Any] = (),
    ) -> None:
        """Take over `layer`, with caches of `dtype`, `ends` (a dataclass of `Ends`) and the MLP.

        `few` are the arguments of the compiled layer, None if it cannot be compiled. `many` are those for more rows.
        `pinned` are the projections that exact mode changes.
        """
        self.kind = kind  # type: ignore[misc]
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.recurrence, self.dtype, self.mlp = recurrence, dtype, mlp
        self._few, self._many, self._pinned = few, many, pinned
        self._take_ends(ends)

    def _take_ends(self, ends: Any) -> None:
        self._parts = (self.recurrence.kernel, self.recurrence.shape, ends)
        self._compiled = compiled(_run, self._parts)

    def share(self, communicator: Communicator) -> None:
        super().share(communicator)
        self._take_ends(replace(self._parts[2], communicator=communicator))

    def new_cache(self, kv_format: KVFormat) -> SnapshotGDNCache:
        return SnapshotGDNCache.empty(self.recurrence, self.dtype)

    def pin_exact(self, products: ExactProducts) -> None:
        if not self._pinned:
            super().pin_exact(products)
        for part in (*self._pinned, self.mlp):
            part.pin_exact(products)

    def forward(
        self,
        x: mx.array,
        caches: Sequence[SnapshotGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        windows = next_windows(caches, widths, stay_open)
        arrays = gather_windows(x, windows)
        # A first window has no past: any rows stand for it, and every shape of them would be traced.
        past = None if arrays.past is x else arrays.past
        run, own = _run, self._many
        if self._few is not None and past is not None and x.shape[0] <= self._parts[2].most_rows:
            run, own = self._compiled, self._few
        states = past, arrays.conv, arrays.state, arrays.spans
        x, rows, conv, state = run(self._parts, x, own.project, own.finish, self.recurrence.constants, states)
        kept, moved = kept_rows(rows, windows)
        record_windows(caches, moved, kept, Snapshots(conv, state))
        return x if own.has_mlp else self.mlp.add_output(x, self.mlp_norm)


def _run(parts: Any, x: mx.array, before: Any, after: Any, constants: Any, states: Any) -> Any:
    """Return `x` after the layer, its projected rows, and the saved states."""
    kernel, heads, ends = parts
    past, *arrays = states
    rows = ends.project(x, before)
    y, conv, state = kernel(heads, rows, rows if past is None else past, *arrays, tuple(constants))
    return ends.finish(x, y, after), rows, conv, state
