"""The plan of packed weights: the tensors of each, found by their names. Pure functions on text.

A packed weight becomes one parameter of the plan, `….weight`, whatever the number of its tensors. The names of fused
experts have no module: `experts.gate_up_proj_scale_inv` is the scale of `experts.gate_up_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mtp.checkpoint.format.foreign import ForeignQuantization, UnsupportedQuantizationError
from mtp.checkpoint.format.header import TensorInfo
from mtp.checkpoint.format.names import Layout, Source, name_sources
from mtp.packing.packing import MEMBERS, REQUIRED, Member, Packing
from proto.errors import CheckpointError

_FUSED = re.compile(r"(.*\bexperts\.(?:gate_up|down)_proj)(?:_((?:weight_)?\w+))?")

_NEVER_READ = ("weight_shape",)
"""Tensors of packed weights whose content follows from the shapes."""

_OF_ACTIVATIONS = re.compile(
    r"(input|output|act)_(global_)?(scale|zero_point|scale_inv)|activation_scale"
)
"""Scales of activations. They change nothing here, because activations are not quantized."""

Named = tuple[str, str]
"""The name of a tensor within its part, and its stored name."""


def plan_packed(
    part: str,
    stored: Iterable[Named],
    foreign: ForeignQuantization,
    tensors: dict[str, TensorInfo],
    layout: Layout,
    num_experts: int,
) -> tuple[dict[str, Source], list[Named], list[str]]:
    """Return the Sources of packed weights, the tensors that belong to none, and the names of ignored tensors."""
    modules: dict[str, dict[str, Named]] = {}
    others: list[Named] = []
    for within, name in stored:
        module, leaf = _split(within)
        if leaf in MEMBERS or leaf in _NEVER_READ or _OF_ACTIVATIONS.fullmatch(leaf):
            modules.setdefault(module, {})[leaf] = (within, name)
        else:
            others.append((within, name))
    plan: dict[str, Source] = {}
    ignored: list[str] = []
    for module, named in modules.items():
        leaves = {leaf: name for leaf, (_, name) in named.items()}
        types = {leaf: tensors[name].dtype for leaf, name in leaves.items()}
        packing = _packing(foreign, _path(leaves), types)
        if packing is None:
            others += named.values()
            continue
        ignored += [name for leaf, name in leaves.items() if _OF_ACTIVATIONS.fullmatch(leaf)]
        plan |= _sources(part, module, leaves, packing, layout, num_experts)
    return plan, others, ignored


def _packing(foreign: ForeignQuantization, module: str, types: dict[str, str]) -> Packing | None:
    """Return the packing of a module. Raises CheckpointError for a config that cannot be read."""
    try:
        return foreign.packing(module, types)
    except (UnsupportedQuantizationError, re.error, TypeError) as error:
        raise CheckpointError(
            f"config.json: the quantization of {module} cannot be read: {error}. Download it again."
        ) from error


def _split(within: str) -> tuple[str, str]:
    """Split a name within a part into module and leaf. A fused tensor of experts is a module with the leaf `weight`."""
    if fused := _FUSED.fullmatch(within):
        leaf = fused[2] or "weight"
        return fused[1], leaf if leaf in MEMBERS else f"weight_{leaf}"
    module, _, leaf = within.rpartition(".")
    return module, leaf


def _path(leaves: dict[str, str]) -> str:
    """Return the stored name of a module, as the config of its exporter names it."""
    return next(iter(leaves.values())).rpartition(".")[0]


def _sources(
    part: str,
    module: str,
    leaves: dict[str, str],
    packing: Packing,
    layout: Layout,
    num_experts: int,
) -> dict[str, Source]:
    """Return the parameters that a packed module gives: one, or the two halves of fused experts."""
    members = {MEMBERS[leaf]: name for leaf, name in leaves.items() if leaf in MEMBERS}
    weight = members.pop("weight")
    for member in REQUIRED[packing.form]:
        members.setdefault(member, _missing_name(weight, packing, member))
    fused = _FUSED.fullmatch(module) is not None
    within = module if fused else f"{module}.weight".removeprefix(".")
    usual = weight if fused else f"{weight.rpartition('.')[0]}.weight"
    found: dict[str, Source] = {}
    for target, source in name_sources(part, within, usual, layout, num_experts):
        stored = source.stored if fused else _with_leaf(source.stored, weight)
        beside: dict[Member, tuple[str, ...]] = {
            member: (name,) if len(stored) == 1 else _with_leaf(stored, name)
            for member, name in members.items()
        }
        found[target] = replace(source, stored=stored, packing=packing, members=beside)
    return found


def _with_leaf(names: tuple[str, ...], like: str) -> tuple[str, ...]:
    """Return `names` with the last part of `like`."""
    leaf = like.rpartition(".")[2]
    return tuple(f"{name.rpartition('.')[0]}.{leaf}" for name in names)


def _missing_name(weight: str, packing: Packing, member: Member) -> str:
    """Return the name that a missing member would have."""
    module, _, leaf = weight.rpartition(".")
    names = [name for name, role in MEMBERS.items() if role == member]
    if packing.form in ("gptq", "awq"):
        names = [name for name in names if not name.startswith("weight")]
    elif leaf not in ("weight", "weight_packed"):  # fused experts
        return f"{weight}_scale_inv"
    return f"{module}.{names[0]}"
