"""A GatedDeltaNet layer with fused projections and the window kernel, and the state of a sequence for it.

The kernel advances a state over the accepted tokens of the window before, and then over the new ones. So the cache
holds the state before the newest window and the rows of this window. A rejection changes only a number.

The states of sequences that run together are slots of one array as long as they run together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer, GatedDeltaNet

from mtp.layers.cuda.gated_delta import HEAD_DIM, TAPS, GatedDeltaShape, gated_delta_window
from mtp.layers.cuda.kernel import HALF_TYPES
from mtp.layers.cuda.packed_linear import FEW_ROWS, PackedLinear, PackedMLP, add_packed_mlp, joined
from mtp.layers.layer import Exact, Hole, KVFormat, Layer, LayerCache, PlainMLP
from mtp.layers.reference.gdn import checked_state


def can_pack_gdn(layer: GatedDeltaNet, dtype: mx.Dtype) -> bool:
    """Return whether the kernel computes `layer` with activations of `dtype`."""
    return (
        dtype in HALF_TYPES
        and layer.head_k_dim == layer.head_v_dim == HEAD_DIM
        and layer.conv_kernel_size == TAPS
        and "bias" not in layer.conv1d
    )


class PackedGDNLayer(Layer):
    """A GatedDeltaNet layer whose input projections are one."""

    kind = "packed"

    def __init__(self, layer: DecoderLayer, dtype: mx.Dtype, mlp: PackedMLP | None) -> None:
        """Pack `layer` for activations of `dtype`. Its MLP is `mlp` if that is packed."""
        net = layer.linear_attn
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.mlp: PackedMLP | PlainMLP = PlainMLP(layer.mlp) if mlp is None else mlp
        self.shape = GatedDeltaShape(net.num_k_heads, net.num_v_heads)
        self.dtype = dtype
        self.constants = (
            net.conv1d.weight.reshape(-1, TAPS).astype(dtype),
            net.A_log.astype(mx.float32),
            net.dt_bias.astype(mx.float32),
            net.norm.weight.astype(dtype),
            mx.array([net.norm.eps]),
        )
        inputs = [net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a]
        self.projection = joined(inputs, padded=True)
        self.out = joined([net.out_proj])
        mx.eval(self.constants)
        self._body: Callable[..., Any] | None = None
        self._weights: tuple[tuple[mx.array, ...], ...] = ()
        """The arguments of the compiled layer between the rows and the state: its own weights, the MLP's, constants.

        They never change, and looking them up takes as long as building an operation."""
        if self.projection.packed and self.out.packed:
            projection, out = self.projection, self.out
            own = (self.norm.weight, projection.w, projection.factors, out.w, out.factors)
            mlp_weights = () if mlp is None else mlp.weights(self.mlp_norm)
            self._body = _compiled_body(self.shape, self.norm.eps)
            self._weights = (own, mlp_weights, self.constants)

    def new_cache(self, kv_format: KVFormat) -> SnapshotGDNCache:
        """See `Layer.new_cache`."""
        return SnapshotGDNCache.empty(self.shape, self.constants, self.dtype)

    def pin_exact(self, products: Exact) -> None:
        """See `Layer.pin_exact`."""
        self.projection.pin_exact(products)
        self.out.pin_exact(products)
        self.mlp.pin_exact(products)

    def add(
        self,
        x: mx.array,
        caches: Sequence[SnapshotGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool] = (),
        holes: Sequence[Hole] = (),
    ) -> mx.array:
        """See `Layer.add`."""
        windows, start = [], 0
        for cache, width, stays_open in zip(caches, widths, stay_open, strict=True):
            windows.append(Window(cache.point, start, width, stays_open))
            start += width
        arrays = gather_windows(x, windows)
        # A first window has no past: any rows stand for it, and every shape of them would be traced.
        past = None if arrays.past is x else arrays.past
        state_arrays = (arrays.conv, arrays.state, arrays.spans)
        if self._body is not None and past is not None and x.shape[0] <= FEW_ROWS:
            x, rows, conv, state = self._body(x, *self._weights, past, *state_arrays)
            has_mlp = bool(self._weights[1])
        else:
            rows = self.projection(self.norm(x))
            y, conv, state = gated_delta_window(
                self.shape, rows, rows if past is None else past, *state_arrays, self.constants
            )
            x, has_mlp = self.out(y, x), False
        record_windows(caches, windows, rows, Snapshots(conv, state))
        return x if has_mlp else self.mlp.add(x, self.mlp_norm)


@lru_cache(maxsize=8)
def _compiled_body(shape: GatedDeltaShape, eps: float) -> Callable[..., Any]:
    """Return the layer, traced once for every shape of the arguments."""

    def body(
        x: mx.array,
        weights: Any,
        mlp: Any,
        constants: Any,
        past: mx.array,
        conv: mx.array,
        state: mx.array,
        spans: mx.array,
    ) -> Any:
        norm, w, factors, out_w, out_factors = weights
        rows = PackedLinear(w, factors)(mx.fast.rms_norm(x, norm, eps))
        y, conv, state = gated_delta_window(shape, rows, past, conv, state, spans, tuple(constants))
        x = PackedLinear(out_w, out_factors)(y, x)
        return (add_packed_mlp(mlp, eps, x) if mlp else x), rows, conv, state

    return mx.compile(body)


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Snapshots:
    """The states of sequences that ran together.

    The shapes are `conv [slots, 3, channels]` and `state [slots, value_heads, 128, 128]` in fp32.
    """

    conv: mx.array
    state: mx.array


@dataclass(frozen=True, eq=False)
class Point:
    """A place in a sequence: the snapshot in `slot`, advanced over `count` of `rows` from `start` on."""

    snapshots: Snapshots
    slot: int
    rows: mx.array | None = None
    start: int = 0
    count: int = 0


@dataclass
class SnapshotGDNCache(LayerCache):
    """The present state and the open windows, oldest first, each as the state before it and its rows.

    `constants` are those of the layer, an argument of `gated_delta_window`.
    """

    shape: GatedDeltaShape
    constants: tuple[mx.array, ...]
    point: Point
    tapes: list[Point] = field(default_factory=list)

    @classmethod
    def empty(
        cls, shape: GatedDeltaShape, constants: tuple[mx.array, ...], dtype: mx.Dtype
    ) -> SnapshotGDNCache:
        """Return the state before the first token, with `conv` of `dtype`."""
        conv = mx.zeros((1, TAPS - 1, shape.channels), dtype)
        state = mx.zeros((1, shape.value_heads, HEAD_DIM, HEAD_DIM), mx.float32)
        return cls(shape, constants, Point(Snapshots(conv, state), 0))

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        """Remove the tapes of `whole` accepted windows. With `cut`, keep `cut` tokens of the next one, and no tape."""
        if cut is None:
            del self.tapes[:whole]
            return
        self.point = replace(self.tapes[whole], count=cut)
        self.tapes.clear()

    def copy(self) -> SnapshotGDNCache:
        """Return the same state under another owner, in its own memory."""
        point = self.point
        if point.rows is None or point.count == 0:
            own = slice(point.slot, point.slot + 1)
            held = point.snapshots
            copied = Snapshots(mx.contiguous(held.conv[own]), mx.contiguous(held.state[own]))
        else:
            run = Window(point, 0, 0, stays_open=False)
            _, copied = run_windows(self.shape, self.constants, point.rows, [run])
        return SnapshotGDNCache(self.shape, self.constants, Point(copied, 0))

    def arrays(self) -> list[mx.array]:
        """Return the arrays of the present state. Other sequences may share them."""
        held = [self.point.snapshots.conv, self.point.snapshots.state]
        return held if self.point.rows is None else [*held, self.point.rows]

    @property
    def nbytes(self) -> int:
        """Bytes of this sequence's own slot and rows."""
        held = self.point.snapshots
        rows = 0 if self.point.rows is None else self.point.rows[:1].nbytes * self.point.count
        return (held.conv.nbytes + held.state.nbytes) // held.conv.shape[0] + rows

    def backup_arrays(self, start: int) -> tuple[bool, list[mx.array]]:
        """See `LayerCache.backup_arrays`."""
        return False, self.copy().arrays()

    def filled(self, states: Sequence[Sequence[mx.array]], length: int) -> SnapshotGDNCache:
        """See `LayerCache.filled`."""
        conv, state = checked_state(states[-1], self.arrays())
        return SnapshotGDNCache(self.shape, self.constants, Point(Snapshots(conv, state), 0))


@dataclass(frozen=True)
class Window:
    """Rows `start … start + count` of a frame, which run from `point` on."""

    point: Point
    start: int
    count: int
    stays_open: bool

    @property
    def saved_after(self) -> int:
        """Tokens after the snapshot at which the state is saved: those that a rejection of this window keeps."""
        return self.point.count if self.stays_open else self.point.count + self.count


@dataclass(frozen=True)
class WindowArrays:
    """The arguments of the kernel for some windows besides their rows: `past [any, row]`, `conv`, `state`, `spans`."""

    past: mx.array
    conv: mx.array
    state: mx.array
    spans: mx.array


def gather_windows(rows: mx.array, windows: Sequence[Window]) -> WindowArrays:
    """Join the windows' snapshots and past rows. Nothing is copied if all of them ran together before."""
    snapshots, slots = _join([w.point.snapshots for w in windows], lambda s: s.conv.shape[0])
    pasts, starts = _join(
        [w.point.rows for w in windows if w.point.rows is not None], lambda r: r.shape[0]
    )
    spans, taken = [], 0
    for window, slot in zip(windows, slots, strict=True):
        point, past = window.point, 0
        if point.rows is not None:
            past = starts[taken] + point.start
            taken += 1
        spans.append(
            (slot + point.slot, past, point.count, window.start, window.count, window.saved_after)
        )
    conv, state = (
        (snapshots[0].conv, snapshots[0].state)
        if len(snapshots) == 1
        else (
            mx.concatenate([s.conv for s in snapshots]),
            mx.concatenate([s.state for s in snapshots]),
        )
    )
    past_rows = rows if not pasts else pasts[0] if len(pasts) == 1 else mx.concatenate(pasts)
    return WindowArrays(past_rows, conv, state, _span_array(tuple(spans)))


def run_windows(
    shape: GatedDeltaShape,
    constants: tuple[mx.array, ...],
    rows: mx.array,
    windows: Sequence[Window],
) -> tuple[mx.array, Snapshots]:
    """Run windows of projected `rows`. Return the outputs and the saved states, a slot for each window."""
    arrays = gather_windows(rows, windows)
    out, conv, state = gated_delta_window(
        shape, rows, arrays.past, arrays.conv, arrays.state, arrays.spans, constants
    )
    return out, Snapshots(conv, state)


def record_windows(
    caches: Sequence[SnapshotGDNCache],
    windows: Sequence[Window],
    rows: mx.array,
    saved: Snapshots,
) -> None:
    """Move each cache to the end of its window of `rows`, whose saved states are `saved`."""
    for slot, (cache, window) in enumerate(zip(caches, windows, strict=True)):
        if window.stays_open:
            cache.point = Point(saved, slot, rows, window.start, window.count)
            cache.tapes.append(cache.point)
        else:
            cache.point = Point(saved, slot)


def _join(parts: Sequence[T], size: Callable[[T], int]) -> tuple[list[T], list[int]]:
    """Return the different `parts` and, for each part, the sum of the sizes of those before its own."""
    different: list[T] = []
    first: dict[int, int] = {}
    total = 0
    starts = []
    for part in parts:
        if id(part) not in first:
            first[id(part)] = total
            different.append(part)
            total += size(part)
        starts.append(first[id(part)])
    return different, starts


@lru_cache(maxsize=16)
def _span_array(spans: tuple[tuple[int, ...], ...]) -> mx.array:
    """Return `spans` as int32. All layers of a frame share them."""
    return mx.array(spans, dtype=mx.int32)
