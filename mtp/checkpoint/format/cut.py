"""The share of each layer that one member of a group of machines holds, by the conventions of mlx-lm's `shard`.

Attention is cut by heads, a GatedDeltaNet by its key heads and their value heads, MLPs and experts by their inner
columns, and lm_head by the vocabulary. Norms, routers, the embedding and the first projection of the MTP head stay
whole. A layer that is cut has fewer heads and columns, and its results are partial sums.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Return the fields of a config whose layers are those of one member. Raises SpanError if they cannot be cut."""
    fields, size = dict(text), cut.size
    if fields.get("attention_bias"):
        raise SpanError("attention_bias is true, and a group would add the bias once for each member.")
    heads = int(fields["num_key_value_heads"])
    counts = {name: fields[name] for name in (*HEADS, *COLUMNS) if fields.get(name)}
    wrong = [name for name, whole in counts.items() if whole % size]
    wrong += ["num_key_value_heads"] if heads % size and size % heads else []
    if wrong:
        raise SpanError(
            f"the layers cannot be cut for {size} machines: {wrong[0]} is {fields[wrong[0]]}. Use a group of another "
            "size."
        )
    shares = {name: whole // size for name, whole in counts.items()}
    return fields | shares | {"num_key_value_heads": max(1, heads // size)}


_ROWS = re.compile(
    r".*\b(q_proj|in_proj_(z|b|a|qkvz|ba)|gate_proj|up_proj|(q|kv|f|g)_b_proj|b_proj|[qkv]_conv1d)"
    r"\.(weight|scales|biases|bias)"
)
_KV_ROWS = re.compile(r".*\b[kv]_proj\.(weight|scales|biases|bias)")
_QKV = re.compile(r".*\b(in_proj_qkv|conv1d)\.(weight|scales|biases|bias)")
_HEADS = re.compile(r".*\b(A_log|dt_bias)")
_COLUMNS = re.compile(r".*\b(o_proj|out_proj|down_proj)\.(weight|scales|biases)")


def is_cut(part: str, name: str) -> bool:
    """Return whether the parameter `name` of a part is cut, and not whole on every member."""
    patterns = (_ROWS, _KV_ROWS, _QKV, _HEADS, _COLUMNS)
    return part == "lm_head" or any(pattern.fullmatch(name) for pattern in patterns)


def is_kv(name: str) -> bool:
    """Return whether the parameter `name` projects to keys or values, whose heads members may share."""
    return _KV_ROWS.fullmatch(name) is not None


@dataclass(frozen=True)
class Share:
    """The share of a parameter: the half-open `ranges` of one axis, which follow each other on the member."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def slice_parameter(self, whole: Any) -> list[Any]:
        """Return the ranges of an array of MLX or numpy. None is copied."""
        before = (slice(None),) * self.axis
        return [whole[(*before, slice(start, end))] for start, end in self.ranges]


def share_of(part: str, name: str, shape: Sequence[int], cut: Cut, key_dim: int, head_dim: int) -> Share | None:
    """Return the share of a whole parameter of `shape`, or None if each member holds all of it.

    `key_dim` are a member's outputs for the keys of a GatedDeltaNet. Raises SpanError if the parameter cannot be cut.
    """
    if cut.size == 1 or not is_cut(part, name):
        return None
    if is_kv(name):  # its own heads, or the one that it shares with its neighbours
        heads = shape[0] // head_dim
        first, count = cut.rank * heads // cut.size, max(1, heads // cut.size)
        return Share(0, ((first * head_dim, (first + count) * head_dim),))
    if _QKV.fullmatch(name):
        keys = key_dim * cut.size
        segments = ((0, keys), (keys, 2 * keys), (2 * keys, shape[0]))
        return Share(0, tuple(_part_of(start, end, cut) for start, end in segments))
    last = _COLUMNS.fullmatch(name) is not None or len(shape) == 1
    axis = len(shape) - (1 if last else 2)
    if shape[axis] % cut.size:
        if part == "lm_head":
            return None
        raise SpanError(
            f"{part}.{name} of shape {tuple(shape)} cannot be cut for {cut.size} machines. Use a group of another "
            "size, or a quantization of smaller groups."
        )
    return Share(axis, (_part_of(0, shape[axis], cut),))


def _part_of(start: int, end: int, cut: Cut) -> tuple[int, int]:
    length = (end - start) // cut.size
    return start + cut.rank * length, start + (cut.rank + 1) * length
