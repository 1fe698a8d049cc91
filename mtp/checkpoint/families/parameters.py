"""The table of parameters: for each name the axis of a cut, the rule of its type, and its transform when it is read.

The first row whose pattern matches decides. A name begins with its part, such as `layers.3.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

Transform = Callable[..., mx.array]
"""The function from the stored tensors of a parameter to its value."""

CutBy = Literal["rows", "columns", "heads of keys", "segments", "vocabulary"]
"""The cut of a parameter for the members of a group. Members may share `heads of keys`, which are those of values too.

The `segments` of its rows (`Family.segments`) are cut one by one. The `vocabulary` stays whole if it cannot be cut.
"""


def as_stored(weight: mx.array) -> mx.array:
    """Return `weight`."""
    return weight


@dataclass(frozen=True)
class Source:
    """The stored tensors that one parameter is made of, and their transform, which may decide the type too."""

    stored: tuple[str, ...]
    transform: Transform = as_stored
    decides_type: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors to read, those of a packed weight included."""
        return self.stored


def swap_taps(weight: mx.array) -> mx.array:
    """Return the weights `[C, K, 1]` of a convolution that is stored as `[C, 1, K]`."""
    return mx.contiguous(weight.moveaxis(2, 1))


def add_one(weight: mx.array) -> mx.array:
    """Return the weights of an RMSNorm that is stored as offsets from 1, in fp32, so that a cast rounds only once."""
    return weight.astype(mx.float32) + 1.0


def stack(*experts: mx.array) -> mx.array:
    """Return the weights of all experts in one array."""
    return mx.stack(list(experts))


def gate_half(fused: mx.array) -> mx.array:
    """Return the gate of a fused projection, contiguous for the kernels."""
    return mx.contiguous(mx.split(fused, 2, axis=-2)[0])


def up_half(fused: mx.array) -> mx.array:
    """Return the other half."""
    return mx.contiguous(mx.split(fused, 2, axis=-2)[1])


@dataclass(frozen=True)
class Parameter:
    """The rules of the parameters whose whole name matches `pattern`.

    `cut` None is whole on each member. `raw` and `mlx` are the transforms in the two layouts. A parameter that
    `keeps_type` is never cast. A token reads its share of `routed` ones.
    """

    pattern: str
    cut: CutBy | None = None
    raw: Transform = as_stored
    mlx: Transform = as_stored
    keeps_type: bool = False
    routed: bool = False


PLAIN = Parameter(".*")
"""The rules of all names that no row matches."""

STORED = r"\.(weight|scales|biases|bias)"
"""The tensors of a projection whose rows are cut, plain or quantized."""

_SUMMED = r"\.(weight|scales|biases)"
"""The tensors of a projection whose columns are cut. Each member would add a bias."""

PROJECTIONS = (
    Parameter(r".*\.global_scale", keeps_type=True),
    Parameter(r"lm_head\..*", "vocabulary"),
    Parameter(rf".*\.mlp\.switch_mlp\.(gate|up)_proj{STORED}", "rows", routed=True),
    Parameter(rf".*\.mlp\.switch_mlp\.down_proj{_SUMMED}", "columns", routed=True),
    Parameter(rf".*\.(q_proj|gate_proj|up_proj){STORED}", "rows"),
    Parameter(rf".*\.[kv]_proj{STORED}", "heads of keys"),
    Parameter(rf".*\.(o_proj|down_proj){_SUMMED}", "columns"),
)
"""Attention, MLPs and experts, by the names that most families share."""

GATED_DELTA = (
    Parameter(r".*\.linear_attn\.conv1d\.weight", "segments", raw=swap_taps),
    Parameter(rf".*\.(in_proj_qkv|conv1d){STORED}", "segments"),
    Parameter(rf".*\.in_proj_(z|b|a|qkvz|ba){STORED}", "rows"),
    Parameter(r".*\.A_log", "rows", keeps_type=True),
    Parameter(r".*\.dt_bias", "rows"),
    Parameter(rf".*\.out_proj{_SUMMED}", "columns"),
)
"""A GatedDeltaNet."""

OFFSET_NORMS = (
    Parameter(
        r"(mtp\.)?norm\.weight|.*\.(input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight"
        r"|mtp\.pre_fc_norm_(embedding|hidden)\.weight",
        raw=add_one,
    ),
)
"""The RMSNorms of Qwen, whose raw weights are offsets from 1. `linear_attn.norm` is none."""
