"""Checkpoints that other programs packed: the packing of each weight, and the tensors that belong to it.

Only the conversion reads them. A packed weight has several tensors, its members. `open_source` joins them into one
parameter of the plan, `….weight`. The form of a packing follows from the names and types of its tensors. The config
has only what they do not show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ForeignPacking
from mtp.checkpoint.format.names import Source
from mtp.checkpoint.format.shard import TensorInfo
from proto.errors import CheckpointError

Form = Literal["fp8", "nvfp4", "mxfp4", "int8", "words", "gptq", "awq"]
"""The layouts of packed weights. `words` is that of compressed-tensors, with the inputs of one output in one row."""

Member = Literal["weight", "scale", "factor", "divisor", "zeros", "order", "shape"]
"""The roles of the tensors of a packed weight. `scale` has one value per group, row, block or tensor. `factor`
multiplies and `divisor` divides all scales. `zeros` has a zero point per group, `order` the group of each input."""

MEMBERS: dict[str, Member] = {
    "weight": "weight",
    "weight_packed": "weight",
    "qweight": "weight",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "scales": "scale",
    "weight_scale_2": "factor",
    "weight_global_scale": "divisor",
    "weight_zero_point": "zeros",
    "qzeros": "zeros",
    "weight_g_idx": "order",
    "g_idx": "order",
    "weight_shape": "shape",
}
"""The member that each stored name of a packed weight is."""

_NEEDED = {"qweight": ("scales", "qzeros"), "weight_packed": ("weight_scale",)}
"""The tensors that a packed weight needs beside it. Elsewhere the scale tells that a weight is packed."""

_OF_ACTIVATIONS = re.compile(
    r"(input|output|act)_(global_)?(scale|zero_point|scale_inv)|activation_scale"
)
"""Scales of activations. They change nothing here, because activations are not quantized."""

_FUSED = re.compile(r"(.*\bmlp)\.experts\.(gate_up|down)_proj_(?:weight_)?(\w+)")
"""Members of fused experts, such as `experts.gate_up_proj_scale_inv`. They have no module of their own."""

_USUAL_BLOCK = (128, 128)
"""Rows and columns per FP8 scale where the config does not name them: ModelOpt's only block."""


@dataclass(frozen=True)
class Packing:
    """The packing of one weight: rows and columns per FP8 scale, and what is added to stored zero points."""

    form: Form
    block: tuple[int, int] = _USUAL_BLOCK
    zero_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class PackedSource(Source):
    """The source of a packed weight: `stored` has the names of its `weight` member, `members` those of the others."""

    packing: Packing
    members: dict[Member, tuple[str, ...]]

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.stored + tuple(name for names in self.members.values() for name in names)


def open_source(path: Path, *, allow_head_only: bool = False) -> Checkpoint:
    """Open a checkpoint to convert it or its head. Raises what `Checkpoint.open` and `plan_packed` raise."""
    return plan_packed(Checkpoint.open(path, to_convert=True, allow_head_only=allow_head_only))


def plan_packed(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with packed weights as PackedSources. Raises CheckpointError for unsupported packings."""
    foreign = checkpoint.config.foreign
    if foreign is None:
        return checkpoint
    if problem := _find_problem(foreign):
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: {problem}. Convert the unquantized checkpoint."
        )
    tensors = checkpoint.tensors
    plans = {part: _plan_part(plan, foreign, tensors) for part, plan in checkpoint.plans.items()}
    return replace(checkpoint, plans=plans)


def _find_problem(foreign: ForeignPacking) -> str:
    """Return the field that is not supported, or an empty string."""
    fields = foreign.fields
    if _object(fields.get("transform_config")).get("config_groups"):
        return "transform_config rotates the activations, which is not supported"
    layout = str(fields.get("checkpoint_format") or fields.get("version") or "gptq").lower()
    if foreign.name in ("GPTQ", "AWQ") and layout not in ("gptq", "gptq_v2", "gemm"):
        return f"the layout {layout!r:.40} is not supported, only gptq, gptq_v2 and gemm"
    return ""


def _plan_part(
    plan: dict[str, Source], foreign: ForeignPacking, tensors: dict[str, TensorInfo]
) -> dict[str, Source]:
    """Return the plan of a part with the members of each packed weight joined."""
    modules: dict[str, dict[str, Source]] = {}
    found: dict[str, Source] = {}
    for name, source in plan.items():
        for module, leaf in _split(name):
            if leaf in MEMBERS:
                modules.setdefault(module, {})[leaf] = source
            elif not _OF_ACTIVATIONS.fullmatch(leaf):
                found[name] = source
    for module, leaves in modules.items():
        known = {leaf: tensors.get(source.stored[0]) for leaf, source in leaves.items()}
        types = {leaf: info.dtype for leaf, info in known.items() if info is not None}
        packing = find_packing(foreign, types)
        prefix = f"{module}." if module else ""
        if packing is None:
            found |= {f"{prefix}{leaf}": source for leaf, source in leaves.items()}
        else:
            found[f"{prefix}weight"] = _join(packing, leaves)
    return found


def _split(name: str) -> list[tuple[str, str]]:
    """Return the module and leaf of a name within a part. A member of fused experts belongs to two modules."""
    fused = _FUSED.fullmatch(name)
    if fused is None:
        module, _, leaf = name.rpartition(".")
        return [(module, leaf)]
    leaf = f"weight_{fused[3]}" if f"weight_{fused[3]}" in MEMBERS else fused[3]
    projections = ("gate", "up") if fused[2] == "gate_up" else ("down",)
    return [(f"{fused[1]}.switch_mlp.{projection}_proj", leaf) for projection in projections]


def _join(packing: Packing, leaves: dict[str, Source]) -> PackedSource:
    """Return the source of a packed weight. Tensors that it needs and the checkpoint lacks are among its members."""
    weight = next(leaf for leaf in leaves if MEMBERS[leaf] == "weight")
    source = leaves[weight]
    members = {MEMBERS[leaf]: other.stored for leaf, other in leaves.items() if leaf != weight}
    for leaf in _NEEDED.get(weight, ()):
        names = tuple(f"{name.rpartition('.')[0]}.{leaf}" for name in source.stored)
        members.setdefault(MEMBERS[leaf], names)
    return PackedSource(source.stored, source.transform, packing=packing, members=members)


def find_packing(foreign: ForeignPacking, types: dict[str, str]) -> Packing | None:
    """Return the packing of a module with the stored `types` by leaf; None when it has no packing that is known."""
    match types:
        case {"qweight": _}:
            awq = foreign.name == "AWQ" or "awq" in str(foreign.fields.get("packing_format"))
            form: Form = "awq" if awq else "gptq"
            return Packing(form, zero_offset=0 if awq else _zero_offset(foreign))
        case {"weight_packed": "I32"}:
            return Packing("words")
        case {"weight_packed": "U8", "weight_scale": "U8" | "F8_E8M0"}:
            return Packing("mxfp4")
        case {"weight_packed": "U8"}:
            return Packing("nvfp4")
        case {"weight": "F8_E4M3", "weight_scale": _} | {
            "weight": "F8_E4M3",
            "weight_scale_inv": _,
        }:
            return Packing("fp8", _block(foreign.fields))
        case {"weight": "U8", "weight_scale": "U8" | "F8_E8M0"}:
            return Packing("mxfp4")
        case {"weight": "U8", "weight_scale": "F8_E4M3"}:
            return Packing("nvfp4")
        case {"weight": "I8", "weight_scale": _}:
            return Packing("int8")
    return None


def _zero_offset(foreign: ForeignPacking) -> int:
    """Return what is added to stored zero points: GPTQ's first layout stores one less, and AutoRound copies it."""
    if foreign.name == "AutoRound":
        layout = str(foreign.fields.get("packing_format", "auto_round:auto_gptq"))
        return int("gptq" in layout and "gptqmodel" not in layout)
    return int(foreign.fields.get("checkpoint_format", "gptq") != "gptq_v2")


def _block(fields: dict[str, Any]) -> tuple[int, int]:
    """Return the rows and columns per FP8 scale of a weight in blocks."""
    groups = _object(fields.get("config_groups")).values()
    weights = [_object(_object(group).get("weights")) for group in groups]
    named = [fields.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
    match [block for block in named if block is not None]:
        case []:
            return _USUAL_BLOCK
        case [[int(rows), int(columns)], *_] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"config.json: the FP8 block {named!r:.60} is invalid: two positive integers are needed. "
        "Download it again."
    )


def _object(value: Any) -> dict[str, Any]:
    """Return an object of the config; empty if the value is something else."""
    return value if isinstance(value, dict) else {}
