"""The share of each layer that one member of a group of machines holds, by the conventions of mlx-lm's `shard`.

Attention is cut by heads, a GatedDeltaNet by its key heads and their value heads, MLPs and experts by their inner
columns, and lm_head by the vocabulary. Norms, routers, the embedding and the first projection of the MTP head stay
whole. A layer that is cut has fewer heads and columns, and its results are partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mtp.checkpoint.families.parameters import CutBy
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


@dataclass(frozen=True)
class Share:
    """The share of a parameter: the half-open `ranges` of one axis, which follow each other on the member."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def slice_parameter(self, whole: Any) -> list[Any]:
        """Return the ranges of an array of MLX or numpy. None is copied."""
        before = (slice(None),) * self.axis
        return [whole[(*before, slice(start, end))] for start, end in self.ranges]


def share_of(
    name: str, by: CutBy | None, shape: Sequence[int], cut: Cut, segments: Sequence[int], head_dim: int
) -> Share | None:
    """Return the share of a whole parameter of `shape` that is cut `by`, or None if each member holds all of it.

    `segments` are the rows of a member's segments. Raises SpanError if the parameter cannot be cut; `name` is for it.
    """
    if cut.size == 1 or by is None:
        return None
    if by == "heads of keys":  # its own heads, or the one that it shares with its neighbours
        heads = shape[0] // head_dim
        first, count = cut.rank * heads // cut.size, max(1, heads // cut.size)
        return Share(0, ((first * head_dim, (first + count) * head_dim),))
    if by == "segments":
        starts = accumulate(segments, initial=0)
        own = ((start * cut.size + cut.rank * rows, rows) for start, rows in zip(starts, segments, strict=False))
        return Share(0, tuple((first, first + rows) for first, rows in own))
    axis = len(shape) - (1 if by == "columns" or len(shape) == 1 else 2)
    length, rest = divmod(shape[axis], cut.size)
    if rest and by == "vocabulary":
        return None
    if rest:
        raise SpanError(
            f"{name} of shape {tuple(shape)} cannot be cut for {cut.size} machines. Use a group of another "
            "size, or a quantization of smaller groups."
        )
    return Share(axis, ((cut.rank * length, (cut.rank + 1) * length),))
