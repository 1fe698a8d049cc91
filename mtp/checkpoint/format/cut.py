"""The share of each layer that one member of a group of machines holds.

Attention is cut by heads, a GatedDeltaNet by its key heads and their value heads, MLPs and experts by their inner
columns, and lm_head by the vocabulary. Norms, routers, the embedding and the first projection of the MTP head stay
whole. These are the conventions of mlx-lm's `shard`. A layer that is cut is a layer of the same kind with fewer heads
and columns, whose results are partial sums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from proto.errors import SpanError


@dataclass(frozen=True)
class Cut:
    """The share of member `rank`, counted from 0, of `size` members. One member holds everything."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise SpanError(f"member {self.rank} of {self.size}: count members from 0")


WHOLE = Cut()

HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
COLUMNS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def cut_fields(text: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Return the fields of a config whose layers are those of one member.

    K/V heads are repeated where there are more members. Raises SpanError for another number that `cut.size` does not
    divide.
    """
    fields, size = dict(text), cut.size
    for name in (*HEADS, *COLUMNS):
        if not (whole := fields.get(name)):
            continue
        if whole % size:
            raise SpanError(
                f"the layers cannot be cut for {size} machines: {name} is {whole}. Use a group of another size."
            )
        fields[name] = whole // size
    heads = int(fields["num_key_value_heads"])
    if heads % size and size % heads:
        raise SpanError(
            f"the layers cannot be cut for {size} machines: num_key_value_heads is {heads}. Use a group of another "
            "size."
        )
    fields["num_key_value_heads"] = max(1, heads // size)
    return fields


_ROWS = re.compile(
    r".*\b(q_proj|in_proj_(z|b|a|qkvz|ba)|gate_proj|up_proj)\.(weight|scales|biases|bias)"
)
_KV_ROWS = re.compile(r".*\b[kv]_proj\.(weight|scales|biases|bias)")
_QKV = re.compile(r".*\b(in_proj_qkv|conv1d)\.(weight|scales|biases|bias)")
_HEADS = re.compile(r".*\b(A_log|dt_bias)")
_COLUMNS = re.compile(r".*\b(o_proj|out_proj|down_proj)\.(weight|scales|biases)")


def is_cut(part: str, name: str) -> bool:
    """Return whether the parameter `name` of a part is cut, and not whole on every member."""
    patterns = (_ROWS, _KV_ROWS, _QKV, _HEADS, _COLUMNS)
    return part == "lm_head" or any(pattern.fullmatch(name) for pattern in patterns)


def cut_weight(
    part: str, name: str, weight: mx.array, cut: Cut, key_dim: int, head_dim: int
) -> mx.array:
    """Return the share of a whole parameter. `key_dim` are a member's outputs for the keys of a GatedDeltaNet.

    `head_dim` is that of attention. Raises SpanError if the parameter cannot be cut, as groups of a quantization that
    cross the border of two members.
    """
    if cut.size == 1 or not is_cut(part, name):
        return weight
    if part == "lm_head":
        return weight if weight.shape[0] % cut.size else _slice(weight, 0, cut)
    if _KV_ROWS.fullmatch(name):
        return _heads_of(weight, head_dim, cut)
    if _QKV.fullmatch(name):
        whole = key_dim * cut.size
        q, k, v = mx.split(weight, [whole, 2 * whole], axis=0)
        return mx.concatenate([_slice(segment, 0, cut) for segment in (q, k, v)])
    columns = _COLUMNS.fullmatch(name) is not None
    axis = -1 if columns or weight.ndim == 1 else -2
    if weight.shape[axis] % cut.size:
        raise SpanError(
            f"{part}.{name} of shape {weight.shape} cannot be cut for {cut.size} machines. Use a group of another "
            "size, or a quantization of smaller groups."
        )
    return _slice(weight, axis, cut)


def _slice(weight: mx.array, axis: int, cut: Cut) -> mx.array:
    """Return the share of an axis, contiguous, since kernels would copy a view at each call."""
    return mx.contiguous(mx.split(weight, cut.size, axis=axis)[cut.rank])


def _heads_of(weight: mx.array, head_dim: int, cut: Cut) -> mx.array:
    """Return the K/V heads of a member: its own, or the one that it shares with its neighbours."""
    heads = weight.shape[0] // head_dim
    count = max(1, heads // cut.size)
    first = cut.rank * heads // cut.size
    return mx.contiguous(weight[first * head_dim : (first + count) * head_dim])
