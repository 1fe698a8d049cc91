"""Linear layers and MLPs side by side, as MLX's own products of one array of weights, and the kernel of sum and norm.

A function that runs a part of a layer takes its weights as arguments, so that layers of one shape share one trace of
`mx.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtp.layers.communicator import ALONE, Communicator
from mtp.layers.layer import Exact
from mtp.layers.metal.kernel import MetalKernel

COMPILED_ROWS = 64
"""Rows up to which parts of a layer are compiled. Each number of rows is traced once, and prompts have many."""

Weights = tuple[mx.array, ...]


@dataclass(frozen=True)
class Format:
    """The quantization of weights, by MLX's names. `bits` None is none."""

    bits: int | None = None
    group_size: int = 0
    mode: str = ""

    @classmethod
    def of(cls, module: Any) -> Format | None:
        """Return the format of a linear layer that can be joined, None for any other module."""
        if "weight" not in module or "bias" in module or "global_scale" in module:
            return None
        if type(module) is nn.Linear:
            return cls()
        if type(module) is nn.QuantizedLinear:
            return cls(module.bits, module.group_size, module.mode)
        return None

    def multiply(self, x: mx.array, weights: Weights) -> mx.array:
        """Return `x [rows, inputs]` times the weights: `[rows, outputs]`."""
        if self.bits is None:
            return x @ weights[0].T
        weight, scales, biases = (*weights, None)[:3]
        assert weight is not None and scales is not None
        return mx.quantized_matmul(
            x, weight, scales, biases, True, self.group_size, self.bits, self.mode
        )


@dataclass(frozen=True, eq=False)
class JoinedLinear:
    """Linear layers of one format, whose outputs follow each other."""

    format: Format
    weights: Weights

    @property
    def dtype(self) -> mx.Dtype:
        """The type of dense weights or of scales."""
        return self.weights[0 if self.format.bits is None else 1].dtype

    @classmethod
    def of(cls, modules: Sequence[Any], order: mx.array | None = None) -> JoinedLinear | None:
        """Return `modules` as one, or None if they have different formats. Several modules lose their weights.

        `order` are the outputs in another order.
        """
        formats = {Format.of(module) for module in modules}
        types = {(m.scales if "scales" in m else m.weight).dtype for m in modules}
        joined_format = formats.pop()
        if formats or len(types) > 1 or joined_format is None:
            return None
        names = [name for name in ("weight", "scales", "biases") if name in modules[0]]
        weights = tuple(_joined([module[name] for module in modules], order) for name in names)
        if len(modules) > 1:
            mx.eval(weights)
            for module in modules:
                for name in names:
                    del module[name]
            mx.clear_cache()
        return cls(joined_format, weights)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs for `x [rows, inputs]`."""
        return self.format.multiply(x, self.weights)


def _joined(parts: Sequence[mx.array], order: mx.array | None) -> mx.array:
    rows = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
    return rows if order is None else rows[order]


class JoinedMLP:
    """A gated MLP whose gate and up projections are one, with its residual."""

    communicator: Communicator = ALONE

    def __init__(self, gate_up: JoinedLinear, down: JoinedLinear) -> None:
        self.formats = gate_up.format, down.format
        self.weights = gate_up.weights, down.weights

    @classmethod
    def of(cls, mlp: Any) -> JoinedMLP | None:
        """Return `mlp` joined, or None if it is no dense MLP or has different formats."""
        if not all(name in mlp for name in ("gate_proj", "up_proj", "down_proj")):
            return None
        if Format.of(mlp.down_proj) is None:
            return None
        gate_up = JoinedLinear.of([mlp.gate_proj, mlp.up_proj])
        down = JoinedLinear.of([mlp.down_proj]) if gate_up else None
        return None if gate_up is None or down is None else cls(gate_up, down)

    def add(self, x: mx.array, norm: Callable[[mx.array], mx.array]) -> mx.array:
        """See `MLP.add`."""
        return x + self.communicator.sum(gated_products(self.formats, self.weights, norm(x)))

    def pin_exact(self, products: Exact) -> None:
        """Raise, because a stage in exact mode keeps the reference."""
        raise NotImplementedError("a joined MLP has no exact mode")


def gated_products(
    formats: tuple[Format, Format], weights: tuple[Weights, Weights], x: mx.array
) -> mx.array:
    """Return a gated MLP of `x [rows, hidden]`."""
    gate, up = mx.split(formats[0].multiply(x, weights[0]), 2, axis=-1)
    return formats[1].multiply(nn.silu(gate) * up, weights[1])


NORM_THREADS = 512
"""Threads of a block, which computes a row."""

NORM_SOURCE = r"""
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int width = x_shape[1];
  const $int64 start = ($int64)blockIdx.x * width;
  $array float sums[16];
  float sum = 0.0f;
  for (int i = tid; i < width; i += 512) {
    const InT value = static_cast<InT>(static_cast<float>(x[start + i]) + static_cast<float>(y[start + i]));
    total[start + i] = value;
    sum = __fmaf_rn(static_cast<float>(value), static_cast<float>(value), sum);
  }
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, m);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  float all = 0.0f;
  for (int i = 0; i < 16; ++i) all += sums[i];
  const float scale = rsqrtf(all / width + eps[0]);
  for (int i = tid; i < width; i += 512) {
    const float value = static_cast<float>(total[start + i]) * scale;
    normed[start + i] = static_cast<InT>(value * static_cast<float>(weight[i]));
  }
"""

_norm_kernel = MetalKernel(
    "residual_norm", ["x", "y", "weight", "eps"], ["total", "normed"], NORM_SOURCE
)


def add_norm(
    x: mx.array, y: mx.array, weight: mx.array, eps: float, own: bool
) -> tuple[mx.array, mx.array]:
    """Return `x + y [rows, hidden]`, and its norm. `own` takes the kernel if all arrays have one type."""
    if not own or not x.dtype == y.dtype == weight.dtype:
        x = x + y
        return x, mx.fast.rms_norm(x, weight, eps)
    total, normed = _norm_kernel(
        [x, y, weight, mx.array([eps])],
        blocks=(x.shape[0], 1, 1),
        threads=NORM_THREADS,
        template=[("InT", x.dtype)],
        shapes=[x.shape, x.shape],
        dtypes=[x.dtype, x.dtype],
    )
    return total, normed
