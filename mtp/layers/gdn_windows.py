"""The state of a sequence in a GatedDeltaNet layer whose kernel runs whole windows, and the windows themselves.

The kernel advances a state over the accepted tokens of the window before, and then over the new ones. So the cache
holds the state before the newest window and the rows of this window. A rejection changes only a number.

The states of sequences that run together are slots of one array as long as they run together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mtp.layers.layer import KVFormat, LayerCache, checked_state

HEAD_DIM = 128
"""Dimension of keys and values; the kernel supports only this one."""

TAPS = 4
"""Inputs of the convolution."""


@dataclass(frozen=True)
class GatedDeltaShape:
    """Heads of a layer. The gate of its output is silu, or sigmoid without `silu`."""

    key_heads: int
    value_heads: int
    silu: bool = True

    @property
    def channels(self) -> int:
        """Inputs of the convolution: q, k and v."""
        return (2 * self.key_heads + self.value_heads) * HEAD_DIM

    @property
    def row(self) -> int:
        """Width of a row: q, k and v, then z, b and a."""
        return self.channels + self.value_heads * (HEAD_DIM + 2)


WindowKernel = Callable[..., tuple[mx.array, mx.array, mx.array]]
"""A kernel that runs windows of several sequences: see `mtp.layers.gated_delta.window_kernel`."""


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A layer between its input rows and its outputs: the kernel, and what it takes of the layer."""

    kernel: WindowKernel
    shape: GatedDeltaShape
    constants: tuple[mx.array, ...]


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Snapshots:
    """The states of sequences that ran together.

    The shapes are `conv [slots, 3, channels]` and `state [slots, value_heads, 128, 128]` in fp32.
    """

    conv: mx.array
    state: mx.array


@dataclass(slots=True, eq=False)
class Point:
    """A place in a sequence: the snapshot in `slot`, advanced over `count` of `rows` from `start` on.

    Treat it as immutable. It is not frozen, because every layer makes one for each sequence and token.
    """

    snapshots: Snapshots
    slot: int
    rows: mx.array | None = None
    start: int = 0
    count: int = 0


@dataclass
class SnapshotGDNCache(LayerCache):
    """The present state and the open windows, oldest first, each as the state before it and its rows."""

    recurrence: Recurrence
    point: Point
    tapes: list[Point] = field(default_factory=list)

    @classmethod
    def empty(cls, recurrence: Recurrence, dtype: mx.Dtype) -> SnapshotGDNCache:
        """Return the state before the first token, with `conv` of `dtype`."""
        shape = recurrence.shape
        conv = mx.zeros((1, TAPS - 1, shape.channels), dtype)
        state = mx.zeros((1, shape.value_heads, HEAD_DIM, HEAD_DIM), mx.float32)
        return cls(recurrence, Point(Snapshots(conv, state), 0))

    def apply_commit(self, whole: int, cut: int | None, trim: int) -> None:
        """Remove the tapes of `whole` accepted windows. With `cut`, keep `cut` tokens of the next one, and no tape."""
        if cut is None:
            del self.tapes[:whole]
            return
        self.point = replace(self.tapes[whole], count=cut)
        self.tapes.clear()

    def copy(self) -> SnapshotGDNCache:
        point = self.point
        if point.rows is None or point.count == 0:
            own = slice(point.slot, point.slot + 1)
            held = point.snapshots
            copied = Snapshots(mx.contiguous(held.conv[own]), mx.contiguous(held.state[own]))
        else:
            run = Window(point, 0, 0, stays_open=False)
            _, copied = run_windows(self.recurrence, point.rows, [run])
        return SnapshotGDNCache(self.recurrence, Point(copied, 0))

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
        return False, self.copy().arrays()

    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> SnapshotGDNCache:
        conv, state = checked_state(states[-1], self.arrays())
        return SnapshotGDNCache(self.recurrence, Point(Snapshots(conv, state), 0))


@dataclass(slots=True)
class Window:
    """Rows `start … start + count` of a frame, which run from `point` on. Treat it as immutable, as `Point`."""

    point: Point
    start: int
    count: int
    stays_open: bool

    @property
    def saved_after(self) -> int:
        """Tokens after the snapshot at which the state is saved: those that a rejection of this window keeps."""
        return self.point.count if self.stays_open else self.point.count + self.count


class WindowArrays(NamedTuple):
    """The arguments of the kernel for some windows besides their rows: `past [any, row]`, `conv`, `state`, `spans`."""

    past: mx.array
    conv: mx.array
    state: mx.array
    spans: mx.array


def next_windows(
    caches: Sequence[SnapshotGDNCache], widths: Sequence[int], stay_open: Sequence[bool]
) -> list[Window]:
    """Return the windows of sequences whose rows follow each other."""
    windows, start = [], 0
    for cache, width, stays_open in zip(caches, widths, stay_open, strict=True):
        windows.append(Window(cache.point, start, width, stays_open))
        start += width
    return windows


def gather_windows(rows: mx.array, windows: Sequence[Window]) -> WindowArrays:
    """Join the windows' snapshots and past rows. Nothing is copied if all of them ran together before."""
    first = windows[0].point
    for window in windows:
        if window.point.snapshots is not first.snapshots or window.point.rows is not first.rows:
            return _joined_windows(rows, windows)
    # Every layer of a frame passes here, so the usual case takes few steps.
    held, past = first.snapshots, rows if first.rows is None else first.rows
    spans = [
        (w.point.slot, w.point.start, w.point.count, w.start, w.count, w.saved_after)
        for w in windows
    ]
    return WindowArrays(past, held.conv, held.state, _span_array(tuple(spans)))


def _joined_windows(rows: mx.array, windows: Sequence[Window]) -> WindowArrays:
    """Return the arrays of windows that did not all run together before."""
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
    conv = mx.concatenate([s.conv for s in snapshots]) if snapshots[1:] else snapshots[0].conv
    state = mx.concatenate([s.state for s in snapshots]) if snapshots[1:] else snapshots[0].state
    past_rows = rows if not pasts else pasts[0] if len(pasts) == 1 else mx.concatenate(pasts)
    return WindowArrays(past_rows, conv, state, _span_array(tuple(spans)))


def run_windows(
    recurrence: Recurrence, rows: mx.array, windows: Sequence[Window]
) -> tuple[mx.array, Snapshots]:
    """Run windows of projected `rows`. Return the outputs and the saved states, a slot for each window."""
    arrays = gather_windows(rows, windows)
    out, conv, state = recurrence.kernel(
        recurrence.shape,
        rows,
        arrays.past,
        arrays.conv,
        arrays.state,
        arrays.spans,
        recurrence.constants,
    )
    return out, Snapshots(conv, state)


def record_windows(
    caches: Sequence[SnapshotGDNCache], windows: Sequence[Window], rows: mx.array, saved: Snapshots
) -> None:
    """Move each cache to the end of its window of `rows`, whose saved states are `saved`."""
    for slot, (cache, window) in enumerate(zip(caches, windows, strict=True)):
        if window.stays_open:
            cache.point = Point(saved, slot, rows, window.start, window.count)
            cache.tapes.append(cache.point)
        else:
            cache.point = Point(saved, slot)


def kept_rows(rows: mx.array, windows: Sequence[Window]) -> tuple[mx.array, Sequence[Window]]:
    """Return the rows of open windows, and the windows with their places in them.

    Rows of prompt chunks would stay in memory as long as a window beside them is open.
    """
    if all(w.stays_open for w in windows) or not any(w.stays_open for w in windows):
        return rows, windows
    parts, moved, start = [], [], 0
    for window in windows:
        moved.append(replace(window, start=start))
        if window.stays_open:
            parts.append(rows[window.start : window.start + window.count])
            start += window.count
    return (mx.contiguous(parts[0]) if len(parts) == 1 else mx.concatenate(parts)), moved


class WindowMixer:
    """A GatedDeltaNet without the layer around it: a product, the kernel for windows, and a product."""

    def __init__(self, recurrence: Recurrence, dtype: mx.Dtype, inputs: Any, out: Any) -> None:
        """Take the fused product of the inputs and that of the output, with caches of `dtype`."""
        self._recurrence, self._dtype = recurrence, dtype
        self._inputs, self._out = inputs, out

    def new_cache(self, kv_format: KVFormat) -> SnapshotGDNCache:
        """See `Layer.new_cache`."""
        return SnapshotGDNCache.empty(self._recurrence, self._dtype)

    def mix(
        self,
        inputs: mx.array,
        caches: Sequence[SnapshotGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool],
    ) -> mx.array:
        """See `GDNLayer.mix`."""
        rows: mx.array = self._inputs(inputs)
        windows = next_windows(caches, widths, stay_open)
        y, saved = run_windows(self._recurrence, rows, windows)
        kept, moved = kept_rows(rows, windows)
        record_windows(caches, moved, kept, saved)
        out: mx.array = self._out(y)
        return out


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
