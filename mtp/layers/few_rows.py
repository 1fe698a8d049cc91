"""The product of few rows with quantized weights on an Apple GPU, which reads the weights once for 8 or 16 rows.

MLX's product of 2 to about 12 rows reads them several times. Here weights are the first operand of the 8 x 8 products
of a SIMD group: y^T = W x^T. A lane takes two slots of consecutive weights of one output straight into registers, and
field s of all slots makes the product s. Fields stay where they are in the word, as exact floats, and the inputs are
scaled by their places before. The scale and the bias of a group are applied to its sum: scale (q . x) + bias sum(x).
SIMD groups share the inputs, and their sums are added in one order. So the bits of a row depend on no other row, and
not on their number.

The places of a lane's two elements in a matrix are those of MLX's `steel/gemm/mma.h`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from typing import Any, Protocol

import mlx.core as mx

from mtp.layers.source_kernel import MetalKernel

Weights = tuple[mx.array, ...]

Step = Callable[[mx.array, Weights], mx.array]
"""A function of rows and weights that returns rows of the same shape, lazily."""


class Quantization(Protocol):
    """The quantization of weights, as `mtp.layers.linear.Format` has it."""

    @property
    def bits(self) -> int | None:
        """Bits of a weight."""

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""

    @property
    def mode(self) -> str:
        """MLX's name."""


TILE = 8
"""Rows and outputs of one matrix."""

TYPES = (mx.float32, mx.float16, mx.bfloat16)
"""Types of rows."""

_MODES = {"affine": 0, "mxfp4": 1, "nvfp4": 2, "mxfp8": 3}
_WORD = 32
_PARTS = 8
"""SIMD groups of a threadgroup, each with every eighth step of the inputs."""

HEADER = """
template <int bytes>
inline uint read_slot(device const uchar* p) {
  if (bytes == 4) return *(device const uint*)p;
  if (bytes == 3) return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16;
  if (bytes == 2) return *(device const ushort*)p;
  return p[0];
}
// 4 bits: 1 of sign, 2 of exponent, 1 of mantissa; 8 bits: 1, 4 and 3. Both lie within a half of another exponent.
inline float float_of_4(uint code) {
  return 16384.0f * float(as_type<half>(ushort((code & 7u) << 9 | (code & 8u) << 12)));
}
inline float float_of_8(uint code) {
  return 256.0f * float(as_type<half>(ushort((code & 127u) << 7 | (code & 128u) << 8)));
}
inline float power_of_2(uint code) {
  return as_type<float>(code == 0 ? 0x400000u : code << 23);
}
"""

SOURCE = """
  // Loops over matrices are unrolled, so that these stay in registers.
  constexpr uint STEP = 8 * FIELDS;         // inputs of eight slots
  constexpr uint SLOT = BITS * FIELDS / 8;  // bytes of a slot
  constexpr uint MASK = (1u << BITS) - 1u;
  const uint rows = x_shape[0], inputs = x_shape[1], outputs = scales_shape[EXPERTS];
  const uint lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
  // A lane's elements of each matrix are (across, along) and (across, along + 1).
  const uint across = ((lane >> 2) & 4) | ((lane >> 1) & 3), along = ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
  const uint first_output = threadgroup_position_in_grid.x * 8 * TILES;
  uint first_row = threadgroup_position_in_grid.y * 8 * ROW_TILES, end_row = rows;
  ulong expert = 0;
  if (EXPERTS) {
    // The rows of an expert follow each other. Each tile of them begins at its first row.
    const uint row = threadgroup_position_in_grid.y;
    expert = experts[row];
    first_row = row;
    while (first_row > 0 && experts[first_row - 1] == experts[row]) first_row--;
    if ((row - first_row) % (8 * ROW_TILES) > 0) return;
    first_row = end_row = row;
    while (end_row < min(rows, row + 8 * ROW_TILES) && experts[end_row] == experts[row]) end_row++;
  }
  device const uchar* weight_bytes = (device const uchar*)w + expert * outputs * (inputs / 8 * BITS);
  const ulong first_group = expert * outputs * (inputs / GROUP);
  float sums[ROW_TILES][TILES][2] = {};

  for (uint step = part; step < inputs / STEP; step += PARTS) {
    simdgroup_float8x8 columns[ROW_TILES][FIELDS];
    float totals[ROW_TILES][2];
    #pragma unroll
    for (uint r = 0; r < ROW_TILES; r++) {
      #pragma unroll
      for (uint e = 0; e < 2; e++) {
        // The last row stands in for those that are missing. Their results are not written.
        const uint row = min(first_row + r * 8 + along + e, end_row - 1);
        device const T* values = x + ulong(row) * inputs + step * STEP + across * FIELDS;
        float total = 0;
        float place = 1;
        #pragma unroll
        for (uint s = 0; s < FIELDS; s++) {
          const float value = float(values[s]);
          total += value;
          columns[r][s].thread_elements()[e] = value * place;
          place *= MODE == 0 ? 1.0f / float(1u << BITS) : 1.0f;
        }
        total += simd_shuffle_xor(total, 2);
        total += simd_shuffle_xor(total, 4);
        total += simd_shuffle_xor(total, 16);
        totals[r][e] = total;
      }
    }
    #pragma unroll
    for (uint t = 0; t < TILES; t++) {
      const uint output = min(first_output + t * 8 + across, outputs - 1);
      device const uchar* slots =
          weight_bytes + ulong(output) * (inputs / 8 * BITS) + (step * 8 + along) * SLOT;
      const uint words[2] = {read_slot<SLOT>(slots), read_slot<SLOT>(slots + SLOT)};
      simdgroup_float8x8 products[ROW_TILES];
      #pragma unroll
      for (uint r = 0; r < ROW_TILES; r++) products[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      #pragma unroll
      for (uint s = 0; s < FIELDS; s++) {
        simdgroup_float8x8 weights;
        #pragma unroll
        for (uint e = 0; e < 2; e++) {
          float value;
          if (MODE == 0) value = float(words[e] & (MASK << (BITS * s)));
          else if (BITS == 4) value = float_of_4((words[e] >> (BITS * s)) & MASK);
          else value = float_of_8((words[e] >> (BITS * s)) & MASK);
          weights.thread_elements()[e] = value;
        }
        #pragma unroll
        for (uint r = 0; r < ROW_TILES; r++) {
          simdgroup_multiply_accumulate(products[r], weights, columns[r][s], products[r]);
        }
      }
      const ulong group = first_group + output * (inputs / GROUP) + step * STEP / GROUP;
      float scale, bias = 0;
      if (MODE == 0) { scale = float(scales[group]); bias = float(biases[group]); }
      else if (MODE == 2) scale = float_of_8(uint(scales[group]));
      else scale = power_of_2(uint(scales[group]));
      #pragma unroll
      for (uint r = 0; r < ROW_TILES; r++) {
        #pragma unroll
        for (uint e = 0; e < 2; e++) {
          const float more = MODE == 0 ? fma(bias, totals[r][e], sums[r][t][e]) : sums[r][t][e];
          sums[r][t][e] = fma(scale, products[r].thread_elements()[e], more);
        }
      }
    }
  }

  threadgroup float parts[PARTS * ROW_TILES * TILES * 64];
  #pragma unroll
  for (uint r = 0; r < ROW_TILES; r++) {
    #pragma unroll
    for (uint t = 0; t < TILES; t++) {
      #pragma unroll
      for (uint e = 0; e < 2; e++) {
        parts[((part * ROW_TILES + r) * TILES + t) * 64 + (along + e) * 8 + across] = sums[r][t][e];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index_in_threadgroup; i < ROW_TILES * TILES * 64; i += PARTS * 32) {
    const uint row = first_row + i / (TILES * 64) * 8 + i / 8 % 8, output = first_output + i / 64 % TILES * 8 + i % 8;
    float sum = 0;
    for (uint p = 0; p < PARTS; p++) sum += parts[p * ROW_TILES * TILES * 64 + i];
    if (row < end_row && output < outputs) y[ulong(row) * outputs + output] = T(sum);
  }
"""


@cache
def _kernel() -> MetalKernel:
    return MetalKernel("few_rows", ("x", "w", "scales", "biases", "experts"), ("y",), SOURCE, HEADER)


def fields_of(kind: Quantization) -> int | None:
    """Return the weights of a slot, None for a format that this product does not have.

    Eight slots lie within a group, and a slot has whole bytes of one word.
    """
    if kind.mode not in _MODES or kind.bits is None:
        return None
    fitting = (f for f in (8, 4, 2) if TILE * f <= kind.group_size and kind.bits * f in (8, 16, 24, 32))
    return next(fitting, None)


def can_multiply(kind: Quantization, weights: Weights, dtype: mx.Dtype) -> bool:
    """Return whether the product has weights of this format, of experts too, and rows of `dtype`."""
    known = TYPES if kind.mode == "affine" else (mx.uint8,)
    if fields_of(kind) is None or dtype not in TYPES or weights[0].ndim not in (2, 3):
        return False
    return weights[0].dtype == mx.uint32 and weights[1].dtype in known


def multiply_few(kind: Quantization, x: mx.array, weights: Weights, experts: mx.array | None = None) -> mx.array:
    """Return `x [rows, inputs]` times the weights: `[rows, outputs]` of the type of `x`. See `can_multiply`.

    With `experts [rows]`, in ascending order, a row is multiplied with the weights of its expert.
    """
    weight, scales, biases = (*weights, None)[:3]
    assert weight is not None and scales is not None
    rows, outputs = x.shape[0], scales.shape[-2]
    tiles = 4 if outputs >= 4096 else 2 if outputs >= 1024 else 1
    row_tiles = 1 if rows <= TILE or experts is not None else 2
    options: dict[str, Any] = {"MODE": _MODES[kind.mode], "BITS": kind.bits, "GROUP": kind.group_size}
    options |= {"FIELDS": fields_of(kind), "TILES": tiles, "ROW_TILES": row_tiles, "PARTS": _PARTS}
    found = _kernel()(
        (x, weight, scales, scales if biases is None else biases, scales if experts is None else experts),
        blocks=(ceil(outputs / (TILE * tiles)), ceil(rows / (TILE * row_tiles)) if experts is None else rows, 1),
        threads=_PARTS * 32,
        template=[("T", x.dtype), *options.items(), ("EXPERTS", int(experts is not None))],
        shapes=((rows, outputs),),
        dtypes=(x.dtype,),
    )
    return found[0]


def time_chain(step: Step, x: mx.array, weights: Sequence[Weights], steps: int) -> float:
    """Return the seconds of a step in a chain of `steps`, without those in which Python describes it."""
    for i in range(steps):
        x = step(x, weights[i % len(weights)])
    began = time.perf_counter()
    mx.eval(x)
    return (time.perf_counter() - began) / steps
