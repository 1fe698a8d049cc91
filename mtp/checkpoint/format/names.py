"""The mapping from the tensor names of a checkpoint to the parameter names of our modules. Pure functions on text.

A *part* is the unit that a stage loads: `embed`, `layers.N`, `norm`, `lm_head`, `mtp`. Within a part a parameter has
the name that mlx-lm's module gives it. `plan_part` returns the stored tensors and the transform of every parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp.checkpoint.families import FAMILIES
from proto.errors import CheckpointError

_TOP = frozenset(module for family in FAMILIES for module in family.head_modules)
_OFFSET_NORMS = frozenset(f"{norm}.weight" for family in FAMILIES for norm in family.offset_norms)

_PREFIX = re.compile(r"(?:mtp_layers|nextn_layers|nextn|mtp)\.(?:0\.)?")
"""The beginnings that name a head. With a number the exporter keeps the whole head in one layer."""

_ALIASES = (
    (re.compile(r"eh_proj\b"), "fc"),
    (re.compile(r"enorm\b"), "pre_fc_norm_embedding"),
    (re.compile(r"hnorm\b"), "pre_fc_norm_hidden"),
    (re.compile(r"shared_head[._]norm\b"), "norm"),
)
"""From the names of DeepSeek's head, which engines use for all heads, to those of Qwen's."""

_OF_THE_MODEL = ("mtp", "embed_tokens", "lm_head")
"""Modules that have their full name in a repo of a head alone."""


_BARE_HEAD = re.compile(r"(fc|fc_embedding|fc_hidden|eh_proj|enorm|hnorm|pre_fc_norm_\w+)\.")
"""The beginnings of names that only a head has, where a file of a head leaves out `mtp.`."""


def is_bare_head(names: Iterable[str]) -> bool:
    """Return whether the `names` of a file are those of a head without the prefix `mtp.`."""
    return any(_BARE_HEAD.match(name) for name in names)


def holds_model(names: Iterable[str]) -> bool:
    """Return whether a model is among the tensors `names`, and not only a head, which has no such layer."""
    return any("linear_attn." in name for name in names)


def with_head_prefix(local: str) -> str:
    """Return a local name of a repo that holds a head alone, where names may lack the prefix."""
    return local if local.partition(".")[0] in _OF_THE_MODEL else _in_head(local)


def _in_head(within: str) -> str:
    for alias, name in _ALIASES:
        within = alias.sub(name, within, count=1) if alias.match(within) else within
    module = within.partition(".")[0]
    return f"mtp.{within}" if module in _TOP else f"mtp.layers.0.{within}"


Layout = Literal["raw", "mlx"]
Transform = Literal["as stored", "conv1d", "taps", "norm + 1", "stack", "gate half", "up half"]

_VISION = re.compile(r"((model|language_model)\.)?(vision_tower|visual)\.")
"""Prefixes of the vision part. Some converters put it below `language_model.`."""

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of raw names, of MLX names, of MLX's lm_head and mtp, and of models of text."""

_MIXER = "hyper_connection_mixer"
"""The final norm of Flash-Next, which has modules of its own."""

_ENDS = {"embed_tokens": "embed", _MIXER: "norm", "norm": "norm", "lm_head": "lm_head"}

IGNORED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|self_attn\.([kv]_proj\.)?(k_scale|v_scale|kv_scale)"
    r"|mtp\.layers\.[1-9]\d*\..*)"
)
"""Extra tensors that do not change results: `inv_freq` follows from the config, no K/V is stored as FP8 here, and only
the first layer of a head drafts."""

ADAPTER_FILES = re.compile(r"adapter_model\.safetensors|(\d+_)?adapters\.safetensors")
"""Files of fine-tuning adapters, as peft and mlx-lm name them. They are no part of the model."""

_EXPERT = re.compile(r"(.*\bmlp)\.experts\.(\d+)\.((?:gate|up|down)_proj\.\w+)")
_FUSED = re.compile(r"(.*\bmlp)\.experts\.(gate_up|down)_proj")

_MOST_NAMED = 3


@dataclass(frozen=True)
class Source:
    """The stored tensors that one parameter is made of, and their transform."""

    stored: tuple[str, ...]
    transform: Transform = "as stored"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors to read, those of a packed weight included."""
        return self.stored


def local_name(stored: str) -> str | None:
    """Return the name without the prefixes of the layouts, such as `layers.3.mlp.…`; `mtp.` begins all names of a head.

    Returns None for a tensor of the vision part.
    """
    if _VISION.match(stored):
        return None
    prefix = next((prefix for prefix in _PREFIXES if stored.startswith(prefix)), "")
    local = stored.removeprefix(prefix)
    found = _PREFIX.match(local)
    return local if found is None else _in_head(local[found.end() :])


def vision_name(stored: str) -> str | None:
    """Return the name of a tensor within the vision part, such as `blocks.0.norm1.weight`, or None for others."""
    found = _VISION.match(stored)
    return stored[found.end() :] if found else None


def is_head(stored: str) -> bool:
    """Return whether a stored tensor belongs to the MTP head."""
    return (local_name(stored) or "").startswith("mtp.")


_LAYER = re.compile(r"layers\.([0-9]{1,9})\.(.+)")


def split_part(local: str, num_layers: int, *, head_is_layer: bool = False) -> tuple[str, str] | None:
    """Split a local name into (part, name within the part); None when no part of this model has this tensor.

    With `head_is_layer` the layer after the last one is the head.
    """
    head, _, rest = local.partition(".")
    if not rest:
        return None
    if head in _ENDS:
        return _ENDS[head], rest
    if head == "mtp":
        return "mtp", rest
    layer = _LAYER.fullmatch(local)
    if layer and head_is_layer and int(layer[1]) == num_layers:
        return "mtp", _in_head(layer[2]).removeprefix("mtp.")
    return (f"layers.{int(layer[1])}", layer[2]) if layer and int(layer[1]) < num_layers else None


def part_names(num_layers: int) -> tuple[str, ...]:
    """Return every part of a model, in the order in which a token passes them."""
    return ("embed", *(f"layers.{i}" for i in range(num_layers)), "norm", "lm_head", "mtp")


def module_path(part: str, within: str) -> str:
    """Return the local name of a module or parameter of a part; the inverse of `split_part`."""
    if part == "norm" and "." in within:
        return f"{_MIXER}.{within}"
    ends = {part: head for head, part in _ENDS.items()}
    return f"{ends.get(part, part)}.{within}".removesuffix(".")


def join_names(names: Sequence[str]) -> str:
    """Return the first of `names` for a message; a longer list would hide the advice that follows it."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def plan_part(part: str, stored: Iterable[tuple[str, str]], layout: Layout, num_experts: int) -> dict[str, Source]:
    """Return the Source of each parameter of a part. `stored` are pairs (name within the part, stored name).

    A stack lists all experts, present or not. Raises CheckpointError when two tensors would become one parameter.
    """
    plan: dict[str, Source] = {}
    for within, name in stored:
        for target, source in name_sources(part, within, name, layout, num_experts):
            if plan.setdefault(target, source) != source:
                raise CheckpointError(
                    f"{module_path(part, target)} is stored twice: as {plan[target].stored[0]} and as {name}"
                )
    return plan


def name_sources(part: str, within: str, name: str, layout: Layout, num_experts: int) -> list[tuple[str, Source]]:
    """Return the parameters that the stored tensor `name` is a part of, each with its Source."""
    if (expert := _EXPERT.fullmatch(within)) and int(expert[2]) < num_experts:
        prefix = name[: -len(f"{expert[2]}.{expert[3]}")]
        stack = tuple(f"{prefix}{e}.{expert[3]}" for e in range(num_experts))
        return [(f"{expert[1]}.switch_mlp.{expert[3]}", Source(stack, "stack"))]
    if fused := _FUSED.fullmatch(within):
        switch = f"{fused[1]}.switch_mlp"
        if fused[2] == "down":
            return [(f"{switch}.down_proj.weight", Source((name,)))]
        return [
            (f"{switch}.gate_proj.weight", Source((name,), "gate half")),
            (f"{switch}.up_proj.weight", Source((name,), "up half")),
        ]
    transform: Transform = "as stored"
    if layout == "raw" and within in ("linear_attn.conv1d.weight", "ple.conv1d.weight"):
        transform = "conv1d"
    elif within.endswith(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")):
        transform = "taps"
    elif layout == "raw" and is_shifted_norm(part, within):
        transform = "norm + 1"
    return [(within, Source((name,), transform))]


def is_shifted_norm(part: str, within: str) -> bool:
    """Return whether a parameter belongs to an RMSNorm whose raw weight is an offset from 1."""
    final_norm = (part, within) in (("norm", "weight"), ("mtp", "norm.weight"))
    return final_norm or ".".join(within.split(".")[-2:]) in _OFFSET_NORMS
