"""A layer in slices: the shares of several members of a group as one layer of one process.

The sums of a group round in another order than one product does. So exact mode can compute every layer in slices, each
with the products of one member. It adds their partial results in the order of the slices. A process holds all of them,
or a member of a group some of them. The bits are the same.

A slice of a product that gives heads or columns is computed beside the others. One whose inputs are cut gives a partial
result `[rows, hidden]`, and these are stacked: `[slices, rows, hidden]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import add
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import DecoderLayer

from mtp.layers.communicator import Communicator


class SlicedSums(Communicator):
    """The sums of stacked partial results, over the slices of all members of `group` in their order."""

    def __init__(self, group: Communicator) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def sum(self, x: mx.array) -> mx.array:
        parts: list[mx.array] = [*self._group.stack(x)]
        return reduce(add, parts)

    def gather(self, x: mx.array) -> mx.array:
        return self._group.gather(x)

    def stack(self, x: mx.array) -> mx.array:
        return self._group.stack(x)


class SlicedOutputs(nn.Module):
    """Slices of a product whose outputs follow each other.

    `segments` are the outputs of one slice that are contiguous. Each segment of all slices comes before the next one.
    """

    def __init__(self, slices: Sequence[nn.Module], segments: Sequence[int] = ()) -> None:
        super().__init__()
        self.slices = list(slices)
        # A list would be a child of the module.
        self._merge = partial(_in_segments, ends=list(accumulate(segments))[:-1], axis=-1)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the product with `x [rows, in]`: `[rows, out]`."""
        return self._merge([module(x) for module in self.slices])


class SlicedInputs(nn.Module):
    """Slices of a product whose inputs follow each other."""

    def __init__(self, slices: Sequence[nn.Module]) -> None:
        super().__init__()
        self.slices = list(slices)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the partial results for `x [rows, in]`: `[slices, rows, out]`."""
        parts = mx.split(x, len(self.slices), axis=-1)
        return mx.stack([module(part) for module, part in zip(self.slices, parts, strict=True)])


class SlicedMLP(nn.Module):
    """Slices of an MLP, dense or of experts."""

    def __init__(self, slices: Sequence[nn.Module]) -> None:
        super().__init__()
        self.slices = list(slices)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the partial results for `x [rows, hidden]`: `[slices, rows, hidden]`."""
        return mx.stack([module(x) for module in self.slices])


def join_layer(slices: Sequence[DecoderLayer], kv_slices: int) -> DecoderLayer:
    """Return loaded slices of one layer, in their order, as one layer of mlx-lm.

    `kv_slices` is the number of neighbouring slices that hold the same heads of keys and values.
    """
    joined: Any = slices[0]
    mlps = [layer.mlp for layer in slices]
    if joined.is_linear:
        _join_gdn(joined.linear_attn, [layer.linear_attn for layer in slices])
    else:
        _join_attention(joined.self_attn, [layer.self_attn for layer in slices], kv_slices)
    joined.mlp = SlicedMLP(mlps)
    layer: DecoderLayer = joined
    return layer


def _join_attention(joined: Any, slices: Sequence[Any], kv_slices: int) -> None:
    kv = slices[::kv_slices]
    for name, modules in (("q_proj", slices), ("k_proj", kv), ("v_proj", kv)):
        joined[name] = SlicedOutputs([module[name] for module in modules])
    joined.o_proj = SlicedInputs([module.o_proj for module in slices])
    joined.slices = len(slices)
    joined.num_attention_heads *= len(slices)
    joined.num_key_value_heads *= len(kv)


def _join_gdn(joined: Any, slices: Sequence[Any]) -> None:
    segments = (joined.key_dim, joined.key_dim, joined.value_dim)
    ends = [joined.key_dim, 2 * joined.key_dim]
    convolutions = [module.conv1d.weight for module in slices]
    joined.conv1d.weight = _in_segments(convolutions, ends, axis=0)
    joined.in_proj_qkv = SlicedOutputs([module.in_proj_qkv for module in slices], segments)
    for name in ("in_proj_z", "in_proj_b", "in_proj_a"):
        joined[name] = SlicedOutputs([module[name] for module in slices])
    for name in ("A_log", "dt_bias"):
        joined[name] = mx.concatenate([module[name] for module in slices])
    joined.out_proj = SlicedInputs([module.out_proj for module in slices])
    for name in ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(joined, name, getattr(joined, name) * len(slices))
    joined.conv1d.groups = joined.conv_dim
    mx.eval(joined.conv1d.weight, joined.A_log, joined.dt_bias)


def _in_segments(parts: Sequence[mx.array], ends: Sequence[int], axis: int) -> mx.array:
    """Return the first segment of all `parts`, then the second, and so on. `ends` are those of all but the last."""
    if not ends:
        return mx.concatenate(list(parts), axis=axis)
    split = [mx.split(part, list(ends), axis=axis) for part in parts]
    return mx.concatenate([part[i] for i in range(len(ends) + 1) for part in split], axis=axis)
