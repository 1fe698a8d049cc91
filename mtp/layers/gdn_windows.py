"""GatedDeltaNet windows as one launch on a GPU, and the state of a sequence between them.

A block of the kernel computes one value head of one sequence: convolution, silu, the norms of q and k, the gates, the
recurrence and the gated norm of its output. The text is the same for NVIDIA and Apple. The state stays in registers in
fp32. The order of every sum is fixed, so a token's result does not depend on the tokens that run with it.

The kernel advances a state over the accepted tokens of the window before (`past`), and then over the new ones. So the
cache holds the state before the newest window and the rows of this window. A rejection changes only a number.

The states of sequences that run together are slots of one array as long as they run together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mtp.layers.layer import HEADS, CutAxis, Hole, KVFormat, LayerCache, checked_state
from mtp.layers.source_kernel import SourceKernel

HEAD_DIM = 128
"""Dimension of keys and values; the kernel supports only this one."""

TAPS = 4
"""Inputs of the convolution."""


@dataclass(frozen=True)
class GatedDeltaShape:
    """Heads of a layer. The gate of its output is silu, or sigmoid without `silu`.

    `decays` are those of a head: 1, or HEAD_DIM, one for each channel of the keys.
    """

    key_heads: int
    value_heads: int
    silu: bool = True
    decays: int = 1

    @property
    def channels(self) -> int:
        """Inputs of the convolution: q, k and v."""
        return (2 * self.key_heads + self.value_heads) * HEAD_DIM

    @property
    def row(self) -> int:
        """Width of a row: q, k and v, then z, b and a."""
        return self.channels + self.value_heads * (HEAD_DIM + 1 + self.decays)


WindowKernel = Callable[..., tuple[mx.array, mx.array, mx.array]]
"""A kernel that runs windows of several sequences: see `window_kernel`."""


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

    def backup_arrays(self, start: int, end: int | None = None) -> list[mx.array]:
        return self.copy().arrays()

    def with_backups(self, states: Sequence[Sequence[mx.array]], length: int) -> SnapshotGDNCache:
        conv, state = checked_state(states[-1], self.arrays())
        return SnapshotGDNCache(self.recurrence, Point(Snapshots(conv, state), 0))

    @property
    def cut_axes(self) -> tuple[CutAxis | None, ...]:
        keys, values = self.recurrence.shape.key_heads, self.recurrence.shape.value_heads
        return CutAxis(2, (keys, keys, values)), HEADS


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


def next_windows(caches: Sequence[SnapshotGDNCache], widths: Sequence[int], stay_open: Sequence[bool]) -> list[Window]:
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
    spans = [(w.point.slot, w.point.start, w.point.count, w.start, w.count, w.saved_after) for w in windows]
    return WindowArrays(past, held.conv, held.state, _span_array(tuple(spans)))


def _joined_windows(rows: mx.array, windows: Sequence[Window]) -> WindowArrays:
    """Return the arrays of windows that did not all run together before."""
    snapshots, slots = _join([w.point.snapshots for w in windows], lambda s: s.conv.shape[0])
    pasts, starts = _join([w.point.rows for w in windows if w.point.rows is not None], lambda r: r.shape[0])
    spans, taken = [], 0
    for window, slot in zip(windows, slots, strict=True):
        point, past = window.point, 0
        if point.rows is not None:
            past = starts[taken] + point.start
            taken += 1
        spans.append((slot + point.slot, past, point.count, window.start, window.count, window.saved_after))
    conv = mx.concatenate([s.conv for s in snapshots]) if snapshots[1:] else snapshots[0].conv
    state = mx.concatenate([s.state for s in snapshots]) if snapshots[1:] else snapshots[0].state
    past_rows = rows if not pasts else pasts[0] if len(pasts) == 1 else mx.concatenate(pasts)
    return WindowArrays(past_rows, conv, state, _span_array(tuple(spans)))


def run_windows(recurrence: Recurrence, rows: mx.array, windows: Sequence[Window]) -> tuple[mx.array, Snapshots]:
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
        return SnapshotGDNCache.empty(self._recurrence, self._dtype)

    def mix(
        self,
        inputs: mx.array,
        caches: Sequence[SnapshotGDNCache],
        widths: Sequence[int],
        stay_open: Sequence[bool],
        holes: Sequence[Hole] = (),
    ) -> mx.array:
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


THREADS = 512
"""Threads of a block: four for each of the 128 rows of a state."""

INPUTS = ["rows", "past", "conv", "state", "spans", "conv_w", "A_log", "dt_bias", "norm_w", "sizes"]
OUTPUTS = ["out", "conv_out", "state_out"]

SOURCE = r"""
  constexpr int D = 128;
  constexpr int TILE = 8;
  constexpr int LANES = 4;
  const int head = blockIdx.x;
  const int seq = blockIdx.y;
  const int tid = threadIdx.x;
  const int lane = tid & 31;
  const int warp = tid >> 5;
  constexpr int KEYS = HK * D;
  constexpr int CHANNELS = 2 * KEYS + HV * D;
  const int width = rows_shape[1];
  $span span = spans + seq * 6;
  const int slot = span[0];
  const int past_start = span[1];
  const int past_count = span[2];
  const int start = span[3];
  const int count = span[4];
  const int save_at = span[5];
  const int total = past_count + count;
  const int key_head = head / (HV / HK);
  const $device InT* conv_ = conv + ($int64)slot * (TAPS - 1) * CHANNELS;

  $array float inputs[TILE][3 * D];
  $array float betas[TILE];
  $array float decays[TILE][DECAYS];
  $array float results[TILE][D];

  // Channel of element e of this head's q, k and v.
  auto channel = [&](int e) {
    return e < D ? key_head * D + e
                 : e < 2 * D ? KEYS + key_head * D + (e - D)
                             : 2 * KEYS + head * D + (e - 2 * D);
  };
  auto row_of = [&](int i) -> const $device InT* {
    return i < past_count ? past + ($int64)(past_start + i) * width
                          : rows + ($int64)(start + i - past_count) * width;
  };
  auto input = [&](int i, int c) -> float {
    return static_cast<float>(i < 0 ? conv_[(TAPS - 1 + i) * CHANNELS + c] : row_of(i)[c]);
  };

  // Thread (row, part) holds elements {16 i + 4 part ... + 3} of state row `row`.
  const int row = tid / LANES;
  const int part = tid % LANES;
  float s[32];
  {
    const $device float4* from = reinterpret_cast<const $device float4*>(
        state + (($int64)slot * HV + head) * D * D + row * D);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4 f = from[i * LANES + part];
      s[4 * i] = f.x; s[4 * i + 1] = f.y; s[4 * i + 2] = f.z; s[4 * i + 3] = f.w;
    }
  }
  auto save = [&]() {
    $device float4* to = reinterpret_cast<$device float4*>(
        state_out + (($int64)seq * HV + head) * D * D + row * D);
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[i * LANES + part] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
  };
  const float rate = expf(static_cast<float>(A_log[head]));
  const float bound = sizes[1];

  if (save_at == 0) save();
  for (int first = 0; first < total; first += TILE) {
    const int n = min(TILE, total - first);
    // Convolution and silu.
    for (int j = tid; j < n * 3 * D; j += 512) {
      const int t = j / (3 * D), e = j % (3 * D), c = channel(e);
      float sum = 0.0f;
      #pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        sum = __fmaf_rn(input(first + t + tap - (TAPS - 1), c),
                        static_cast<float>(conv_w[c * TAPS + tap]), sum);
      }
      inputs[t][e] = sum / (1.0f + expf(-sum));
    }
    if (tid < n) {
      const float b = static_cast<float>(row_of(first + tid)[CHANNELS + HV * D + head]);
      betas[tid] = 1.0f / (1.0f + expf(-b));
    }
    for (int j = tid; j < n * DECAYS; j += 512) {
      const int t = j / DECAYS, e = head * DECAYS + j % DECAYS;
      const float a = static_cast<float>(row_of(first + t)[CHANNELS + HV * (D + 1) + e]) + dt_bias[e];
      const float soft = a > 20.0f ? a : log1pf(expf(a));
      decays[t][j % DECAYS] = expf(bound < 0.0f ? bound / (1.0f + expf(-rate * a)) : -rate * soft);
    }
    __syncthreads();
    // q and k to length one; q takes the scale of the readout.
    {
      const int t = warp >> 1, which = warp & 1;
      if (t < n) {
        $shared float* v = &inputs[t][which * D];
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; ++i) sum = __fmaf_rn(v[lane + 32 * i], v[lane + 32 * i], sum);
        #pragma unroll
        for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
        const float scale = rsqrtf(sum + 1e-6f) * (which ? 1.0f : 0.08838834764831845f);
        #pragma unroll
        for (int i = 0; i < 4; ++i) v[lane + 32 * i] = __fmul_rn(v[lane + 32 * i], scale);
      }
    }
    __syncthreads();
    for (int t = 0; t < n; ++t) {
      const $shared float4* q4 = reinterpret_cast<const $shared float4*>(inputs[t]);
      const $shared float4* k4 = reinterpret_cast<const $shared float4*>(inputs[t] + D);
      float sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 k = k4[i * LANES + part];
        const $shared float* g = decays[t] + (DECAYS == 1 ? 0 : 4 * (i * LANES + part));
        s[4 * i] = __fmul_rn(s[4 * i], g[0]); sum = __fmaf_rn(s[4 * i], k.x, sum);
        s[4 * i + 1] = __fmul_rn(s[4 * i + 1], g[DECAYS > 1]); sum = __fmaf_rn(s[4 * i + 1], k.y, sum);
        s[4 * i + 2] = __fmul_rn(s[4 * i + 2], g[2 * (DECAYS > 1)]); sum = __fmaf_rn(s[4 * i + 2], k.z, sum);
        s[4 * i + 3] = __fmul_rn(s[4 * i + 3], g[3 * (DECAYS > 1)]); sum = __fmaf_rn(s[4 * i + 3], k.w, sum);
      }
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const float delta = __fmul_rn(inputs[t][2 * D + row] - sum, betas[t]);
      float out = 0.0f;
      // Keys read once more, from a place that the compiler cannot know, leave registers for 512 threads.
      const $shared float4* same4 = k4 + (past_count >> 30);
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 k = same4[i * LANES + part];
        const float4 q = q4[i * LANES + part];
        s[4 * i] = __fmaf_rn(k.x, delta, s[4 * i]); out = __fmaf_rn(s[4 * i], q.x, out);
        s[4 * i + 1] = __fmaf_rn(k.y, delta, s[4 * i + 1]); out = __fmaf_rn(s[4 * i + 1], q.y, out);
        s[4 * i + 2] = __fmaf_rn(k.z, delta, s[4 * i + 2]); out = __fmaf_rn(s[4 * i + 2], q.z, out);
        s[4 * i + 3] = __fmaf_rn(k.w, delta, s[4 * i + 3]); out = __fmaf_rn(s[4 * i + 3], q.w, out);
      }
      out += __shfl_xor_sync(0xffffffff, out, 1);
      out += __shfl_xor_sync(0xffffffff, out, 2);
      if (part == 0) results[t][row] = out;
      if (first + t + 1 == save_at) save();
    }
    __syncthreads();
    // Norm over the head, and the gate z.
    if (warp < n && first + warp >= past_count) {
      const int t = warp;
      const $device InT* z = row_of(first + t) + CHANNELS + head * D;
      $device InT* to = out + ($int64)(start + first + t - past_count) * HV * D + head * D;
      float sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y = results[t][lane + 32 * i];
        sum = __fmaf_rn(y, y, sum);
      }
      #pragma unroll
      for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
      const float scale = rsqrtf(sum / D + sizes[0]);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = lane + 32 * i;
        const float gate = static_cast<float>(z[e]);
        const float gated = (SILU ? gate : 1.0f) / (1.0f + expf(-gate));
        to[e] = static_cast<InT>(results[t][e] * scale * static_cast<float>(norm_w[e]) * gated);
      }
    }
    __syncthreads();
  }
  // The convolution's last inputs before what follows the saved state.
  const bool owner = head % (HV / HK) == 0;
  for (int j = tid; j < 3 * D; j += 512) {
    if (j < 2 * D && !owner) continue;
    const int c = channel(j);
    #pragma unroll
    for (int tap = 0; tap < TAPS - 1; ++tap) {
      conv_out[(($int64)seq * (TAPS - 1) + tap) * CHANNELS + c] =
          static_cast<InT>(input(save_at + tap - (TAPS - 1), c));
    }
  }
"""


def has_window_kernel(net: Any) -> bool:
    """Return whether the kernel computes the layer."""
    return net.head_k_dim == net.head_v_dim == HEAD_DIM and net.conv_kernel_size == TAPS and "bias" not in net.conv1d


def window_constants(net: Any, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Return the constants of a layer for the kernel, those beside the activations in `dtype`.

    The last are the epsilon of the norm and the bound of the logarithm of a decay, 0 for none.
    """
    constants = (
        net.conv1d.weight.reshape(-1, TAPS).astype(dtype),
        net.A_log.astype(mx.float32),
        net.dt_bias.astype(mx.float32),
        net.norm.weight.astype(dtype),
        mx.array([net.norm.eps, getattr(net, "bound", None) or 0.0]),
    )
    mx.eval(constants)
    return constants


def recurrence_of(kernel: WindowKernel, net: Any, dtype: mx.Dtype, *, silu: bool = True) -> Recurrence:
    """Return a layer as `kernel` takes it, with activations of `dtype`. The gate of its output is `silu` or sigmoid."""
    heads = GatedDeltaShape(net.num_k_heads, net.num_v_heads, silu, net.dt_bias.size // net.num_v_heads)
    return Recurrence(kernel, heads, window_constants(net, dtype))


def window_kernel(language: type[SourceKernel]) -> WindowKernel:
    """Return the kernel in `language`. It is compiled when it first runs."""
    kernel = language("gated_delta_window", INPUTS, OUTPUTS, SOURCE)

    def gated_delta_window(
        shape: GatedDeltaShape,
        rows: mx.array,
        past: mx.array,
        conv: mx.array,
        state: mx.array,
        spans: mx.array,
        constants: tuple[mx.array, ...],
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Run `spans` int32 `[n, 6]`. Return outputs `[rows, value_heads * 128]`, and the saved states.

        A span has the slot of a state, start and number of its past rows, and start and number of the new ones. Then
        comes the number of tokens after which the state is saved. `rows` and `past` are `[any, shape.row]`. The slots
        index `conv [slots, 3, channels]` and `state [slots, value_heads, 128, 128]`. `constants` are those of
        `window_constants`. Rows that no span names are not written.
        """
        count, heads = spans.shape[0], shape.value_heads
        sizes = [("HK", shape.key_heads), ("HV", heads), ("TAPS", TAPS), ("SILU", int(shape.silu))]
        sizes.append(("DECAYS", shape.decays))
        out, conv_out, state_out = kernel(
            [rows, past, conv, state, spans, *constants],
            blocks=(heads, count, 1),
            threads=THREADS,
            template=[("InT", rows.dtype), *sizes],
            shapes=[
                (rows.shape[0], heads * HEAD_DIM),
                (count, TAPS - 1, shape.channels),
                (count, heads, HEAD_DIM, HEAD_DIM),
            ],
            dtypes=[rows.dtype, rows.dtype, mx.float32],
        )
        return out, conv_out, state_out

    return gated_delta_window
