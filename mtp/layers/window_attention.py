"""Attention of the rows of one window on Apple GPUs, which reads each tile of keys and values once for all rows."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache, reduce
from typing import Any

import mlx.core as mx

from mtp.layers.layer import KVFormat
from mtp.layers.source_kernel import THREADS, MetalKernel

READS = {
    "plain": "EACH(j, (N)) TO(j) = static_cast<float>(NAME[from + j]);",
    "quantized": """constexpr int HELD = 8 * sizeof(WORD) / BITS;
          const device WORD* words = (const device WORD*)NAME + from / HELD;
          EACH(i, (N) / HELD) {
            const uint word = words[i];
            const float step = static_cast<float>(NAME_scales[(from + i * HELD) / GROUP]);
            const float least = static_cast<float>(NAME_biases[(from + i * HELD) / GROUP]);
            EACH(h, HELD) {
              const int j = i * HELD + h;
              TO(j) = fma(step, static_cast<float>((word >> (h * BITS)) & ((1u << BITS) - 1)), least);
            }
          }""",
}
"""The reads of N elements from place `from` of an array NAME, as stored. A word lies in one group."""

SOURCE = """
  // A threadgroup has TILES tiles of 8 pairs of a row and a query head that share a K/V head, and one split of the
  // keys. Simdgroup s multiplies queries with keys 8 (s % 4) of 32, and the values' elements s D / SIMDS.
  constexpr int PAIRS = 8 * TILES, SPAN = D / (SIMDS / 4), F = D / SIMDS / 8, R = SPAN % 64 == 0 ? 8 : 4;
  threadgroup float scores[PAIRS * 32];
  threadgroup float highest[PAIRS];
  threadgroup float total[PAIRS];
  threadgroup float shrink[PAIRS];
  const int thread_ = threadIdx.x, simd = thread_ / 32, lane = thread_ % 32;
  // The place of this lane in a matrix: row `down`, columns `across` and the next.
  const int down = (lane / 4 & 4) + lane / 2 % 4, across = (lane / 4 & 2) * 2 + lane % 2 * 2;
  const int width = q_shape[0], heads = q_shape[1], head = blockIdx.x * GQA, last = width * GQA - 1;
  const int split = marks_shape[0] - 2 - blockIdx.y, end = marks[split + 1], seen = marks[marks_shape[0] - 1];
  const long plane = (long)blockIdx.x * k_shape[2];
  int query[TILES];
  simdgroup_float8x8 out[TILES][F];
  EACH(t, TILES) {
    const int pair = min((int)blockIdx.z * PAIRS + 8 * t + down, last);
    query[t] = (pair / GQA * heads + head + pair % GQA) * D;
    EACH(f, F) out[t][f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int i = thread_; i < PAIRS; i += 32 * SIMDS) {
    highest[i] = LOWEST;
    total[i] = 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int at = marks[split]; at < end; at += 32) {
    simdgroup_float8x8 left, right[8], score[TILES];
    EACH(t, TILES) score[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    // Eight rows of a product are the elements i, i + R, … of a run, so that each lane reads R neighbours.
    for (int d = simd / 4 * SPAN; d < (simd / 4 + 1) * SPAN; d += 8 * R) {
      EACH(e, 2) {
        const int key = at + simd % 4 * 8 + across + e;
        EACH(j, R) right[j].thread_elements()[e] = 0.0f;
        if (key < end) {
          const long from = (plane + key) * D + d + down * R;
          $keys
        }
      }
      EACH(t, TILES) {
        const auto own = q + query[t] + d + across * R;
        EACH(j, R) {
          left.thread_elements()[0] = static_cast<float>(own[j]);
          left.thread_elements()[1] = static_cast<float>(own[R + j]);
          simdgroup_multiply_accumulate(score[t], left, right[j], score[t]);
        }
      }
    }
    if (SIMDS == 8) {
      if (simd >= 4)
        EACH(t, TILES) simdgroup_store(score[t], scores + 256 * t + simd % 4 * 8, 32);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (simd < 4)
      EACH(t, TILES) {
        if (SIMDS == 8) {
          simdgroup_load(left, scores + 256 * t + simd * 8, 32);
          EACH(e, 2) score[t].thread_elements()[e] += left.thread_elements()[e];
        }
        simdgroup_store(score[t], scores + 256 * t + simd * 8, 32);
      }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = simd; i < PAIRS; i += SIMDS) {
      const int row = min((int)blockIdx.z * PAIRS + i, last) / GQA;
      const bool visible = at + lane <= seen - width + row;
      const float found = visible ? scores[32 * i + lane] * scale[0] : LOWEST, before = highest[i];
      const float now = max(before, simd_max(found)), weight = visible ? exp(found - now) : 0.0f;
      const float sum = simd_sum(weight);
      scores[32 * i + lane] = weight;
      if (lane == 0) {
        shrink[i] = exp(before - now);
        total[i] = fma(total[i], shrink[i], sum);
        highest[i] = now;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    EACH(t, TILES)
      EACH(f, F)
        EACH(e, 2) out[t][f].thread_elements()[e] *= shrink[8 * t + down];
    EACH(step, 4) {
      const int key = at + 8 * step + down;
      EACH(j, 2 * F) right[j / 2].thread_elements()[j % 2] = 0.0f;
      if (key < end) {
        const long from = (plane + key) * D + (simd * 8 + across) * F;
        $values
      }
      EACH(t, TILES) {
        simdgroup_load(left, scores + 256 * t + 8 * step, 32);
        EACH(f, F) simdgroup_multiply_accumulate(out[t][f], left, right[f], out[t][f]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  EACH(t, TILES) {
    const int pair = blockIdx.z * PAIRS + 8 * t + down;
    if (pair > last) continue;
    const long place = ((long)split * width + pair / GQA) * heads + head + pair % GQA;
    EACH(j, 2 * F)
      parts[place * D + (simd * 8 + across) * F + j] = out[t][j / 2].thread_elements()[j % 2];
    if (simd == 0 && across == 0) {
      sums[2 * place] = highest[8 * t + down];
      sums[2 * place + 1] = total[8 * t + down];
    }
  }
"""

MERGE = """
  // A simdgroup sums the splits of one head of one row, in order.
  const int lane = threadIdx.x % 32, unit = blockIdx.x * 8 + threadIdx.x / 32;
  const int splits = parts_shape[0], units = parts_shape[1] * parts_shape[2];
  if (unit >= units) return;
  float highest = LOWEST, total = 0.0f, sum[D / 32];
  for (int i = lane; i < splits; i += 32) highest = max(highest, sums[2 * ((long)i * units + unit)]);
  highest = simd_max(highest);
  EACH(j, D / 32) sum[j] = 0.0f;
  for (int i = 0; i < splits; ++i) {
    const long place = (long)i * units + unit;
    const float weight = exp(sums[2 * place] - highest);
    total = fma(weight, sums[2 * place + 1], total);
    EACH(j, D / 32) sum[j] = fma(weight, parts[place * D + lane + 32 * j], sum[j]);
  }
  EACH(j, D / 32) y[(long)unit * D + lane + 32 * j] = static_cast<OutT>(sum[j] / total);
"""
HEADER = """
#define LOWEST -1e30f
#define EACH(i, count) _Pragma("clang loop unroll(full)") for (int i = 0; i < (count); ++i)
"""
"""Names of the sources. Matrices stay in registers only where their loops are unrolled."""


def _kernel(form: str) -> MetalKernel:
    """Return the kernel for keys and values as `form` stores them."""
    source, inputs = SOURCE, ["q", "marks", "scale"]
    for place, name, count, target in (
        ("$keys", "k", "R", "right[j].thread_elements()[e]"),
        ("$values", "v", "2 * F", "right[j / 2].thread_elements()[j % 2]"),
    ):
        names = {"TO(j)": target, "NAME": name, "(N)": f"({count})", "WORD": f"{name.upper()}Word"}
        text = reduce(lambda known, one: known.replace(*one), names.items(), READS[form])
        source = source.replace(place, text)
        inputs += [name] if form == "plain" else [name, f"{name}_scales", f"{name}_biases"]
    return MetalKernel(f"window_attention_{form}", inputs, ["parts", "sums"], source, HEADER)


_KERNELS = {form: _kernel(form) for form in READS}
_merge = MetalKernel("window_attention_merge", ["parts", "sums"], ["y"], MERGE, HEADER)

DIMS = (64, 96, 128, 192, 256)
"""Dimensions of a head that the kernel computes. From 128 on eight simdgroups halve the products, else four do."""

WIDTHS = (2, 4, 8, 16)
"""Rows of the windows that a trial measures. A window is computed as the next wider one of these."""

MOST_TILES = 8
"""Tiles of 8 pairs of a threadgroup: 64 sums a thread and 9 KB. More pairs are several threadgroups."""

FROM_KEYS = 1024
"""Keys from which the kernel is used. For fewer, its second launch costs more than it saves."""


def measured_width(width: int) -> int:
    """Return the width that is measured for windows of `width` rows, or 0 for one row and for prompts."""
    return next((tried for tried in WIDTHS if tried >= width > 1), 0)


def takes_window(windows: Collection[int], width: int, seen: int) -> bool:
    """Return whether the kernel computes `width` rows that see `seen` keys, where it is faster at widths `windows`."""
    return seen >= FROM_KEYS and measured_width(width) in windows


@lru_cache(maxsize=16)
def _marks(seen: int) -> mx.array:
    """Return where splits of `seen` keys begin, and `seen`. They depend on places alone, and so does a row's result.

    A split has 256 keys, and from place 8192 on a sixteenth of the greatest power of two up to its place.
    """
    starts, at = [], 0
    while at < seen:
        starts.append(at)
        at += max(256, (1 << at.bit_length() - 1) // 16 if at else 0)
    return mx.array([*starts, seen], dtype=mx.int32)


@lru_cache(maxsize=16)
def _scale(scale: float) -> mx.array:
    return mx.array([scale])


Held = mx.array | tuple[mx.array, ...]
"""Keys or values with the room for more, `[1, kv_heads, room, dim]`: an array, or the three of a quantized one."""


def window_attention(q: mx.array, keys: Held, values: Held, seen: int, scale: float, kv_format: KVFormat) -> mx.array:
    """Return the causal attention of the last rows `q [1, heads, width, dim]` to the first `seen` keys and values."""
    rows_first = q[0].transpose(1, 0, 2)
    width, heads, dim = rows_first.shape
    plain = isinstance(keys, mx.array)
    held: list[Any] = [keys, values] if plain else [*keys, *values]
    gqa = heads // held[0].shape[1]
    # No more tiles than the measured window has, whose registers the device has.
    groups = -(-measured_width(width) * gqa // (8 * MOST_TILES))
    simds = 4 if dim < 128 else 8
    template = [("D", dim), ("GQA", gqa), ("TILES", -(-width * gqa // (8 * groups))), ("SIMDS", simds)]
    if kv_format.bits is not None:
        span = dim // (simds // 4)
        runs = 8 if span % 64 == 0 else 4, dim // simds // 4
        words = [_word(run * kv_format.bits // 8) for run in runs]
        template += [
            ("BITS", kv_format.bits),
            ("GROUP", kv_format.group_size),
            ("KWord", words[0]),
            ("VWord", words[1]),
        ]
    marks = _marks(seen)
    rows = marks.size - 1, width, heads
    parts, sums = _KERNELS["plain" if plain else "quantized"](
        [rows_first, marks, _scale(scale), *held],
        blocks=(heads // gqa, marks.size - 1, groups),
        threads=32 * simds,
        template=template,
        shapes=[(*rows, dim), (*rows, 2)],
        dtypes=[mx.float32] * 2,
    )
    (y,) = _merge(
        [parts, sums],
        blocks=(-(-width * heads * 32 // THREADS), 1, 1),
        template=[("OutT", q.dtype), ("D", dim)],
        shapes=[(width, heads, dim)],
        dtypes=[q.dtype],
    )
    return y.transpose(1, 0, 2)[None]


def _word(size: int) -> mx.Dtype:
    """Return the widest type of words that `size` bytes consist of."""
    return mx.uint8 if size % 2 else mx.uint16 if size % 4 else mx.uint32
