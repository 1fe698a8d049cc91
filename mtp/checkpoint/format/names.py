"""The mapping from the tensor names of a checkpoint to the parameter names of our modules. Pure functions on text.

A *part* is the unit that a stage loads: `embed`, `layers.N`, `norm`, `lm_head`, `mtp`. Within a part a parameter has
the name that mlx-lm's module gives it. `plan_part` returns the stored tensors and the transform of every parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from mtp.checkpoint.families.family import Family, head_name
from mtp.checkpoint.families.parameters import Source, gate_half, stack, up_half
from mtp.checkpoint.known_families import FAMILIES
from proto.errors import CheckpointError

_TOP = frozenset(module for family in FAMILIES for module in family.head_modules)

_PREFIX = re.compile(r"(?:mtp_layers|nextn_layers|nextn|mtp)\.(?:0\.)?")
"""The beginnings that name a head. With a number the exporter keeps the whole head in one layer."""

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
    return f"mtp.{head_name(within, _TOP)}"


Layout = Literal["raw", "mlx"]

_VISION = re.compile(r"((model|language_model)\.)?(vision_tower|visual)\.")
"""Prefixes of the vision part. Some converters put it below `language_model.`."""

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of raw names, of MLX names, of MLX's lm_head and mtp, and of models of text."""

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


def part_names(num_layers: int) -> tuple[str, ...]:
    """Return every part of a model, in the order in which a token passes them."""
    return ("embed", *(f"layers.{i}" for i in range(num_layers)), "norm", "lm_head", "mtp")


def join_names(names: Sequence[str]) -> str:
    """Return the first of `names` for a message; a longer list would hide the advice that follows it."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def plan_part(
    family: Family, part: str, stored: Iterable[tuple[str, str]], layout: Layout, num_experts: int
) -> dict[str, Source]:
    """Return the Source of each parameter of a part. `stored` are pairs (name within the part, stored name).

    A stack lists all experts, present or not. Raises CheckpointError when two tensors would become one parameter.
    """
    plan: dict[str, Source] = {}
    for within, name in stored:
        for target, source in _sources(family, part, within, name, layout, num_experts):
            if plan.setdefault(target, source) != source:
                raise CheckpointError(
                    f"{family.path(part, target)} is stored twice: as {plan[target].stored[0]} and as {name}"
                )
    return plan


def _sources(
    family: Family, part: str, within: str, name: str, layout: Layout, num_experts: int
) -> list[tuple[str, Source]]:
    """Return the parameters that the stored tensor `name` is a part of, each with its Source."""
    if (expert := _EXPERT.fullmatch(within)) and int(expert[2]) < num_experts:
        prefix = name[: -len(f"{expert[2]}.{expert[3]}")]
        stored = tuple(f"{prefix}{e}.{expert[3]}" for e in range(num_experts))
        return [(f"{expert[1]}.switch_mlp.{expert[3]}", Source(stored, stack))]
    if fused := _FUSED.fullmatch(within):
        switch = f"{fused[1]}.switch_mlp"
        if fused[2] == "down":
            return [(f"{switch}.down_proj.weight", Source((name,)))]
        return [
            (f"{switch}.gate_proj.weight", Source((name,), gate_half)),
            (f"{switch}.up_proj.weight", Source((name,), up_half)),
        ]
    rule = family.rule(part, within)
    return [(within, Source((name,), rule.raw if layout == "raw" else rule.mlx))]
