"""Checkpoints that other programs packed: FP8, NVFP4, GPTQ and AutoRound, which only the conversion reads.

`plan_packed` joins the tensors of a packed weight, its members, into one parameter of the plan. Weights of integers
keep their codes in MLX's affine format. FP8 (E4M3) and NVFP4 have scales that no format of MLX has, so they are
dequantized. Functions on arrays take any leading dimensions, such as those of experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mtp.checkpoint.families.parameters import Source, gate_half, stack, up_half
from mtp.checkpoint.format.checkpoint import Checkpoint, Files
from mtp.checkpoint.format.parts import read_part
from mtp.checkpoint.format.shard import TensorInfo
from proto.errors import CheckpointError
from proto.wire import STORED_NAMES

Form = Literal["fp8", "nvfp4", "gptq"]
"""The layouts of packed weights. AutoRound has that of GPTQ."""

Member = Literal["weight", "scale", "factor", "divisor", "zeros", "order"]
"""The roles of the tensors of a packed weight. `factor` multiplies and `divisor` divides all of `scale`. `zeros` has a
zero point per group, `order` the group of each input."""

MEMBERS: dict[str, Member] = {
    "weight": "weight",
    "weight_packed": "weight",
    "qweight": "weight",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "scales": "scale",
    "weight_scale_2": "factor",
    "weight_global_scale": "divisor",
    "qzeros": "zeros",
    "g_idx": "order",
}

_OF_ACTIVATIONS = re.compile(r"(input|output|act)_(global_)?(scale|scale_inv)|activation_scale")
"""Scales of activations. They change nothing here, because activations are not quantized."""

_FUSED = re.compile(r"(.*\bmlp)\.experts\.(gate_up|down)_proj_(?:weight_)?(\w+)")
"""Members of fused experts, such as `experts.gate_up_proj_scale_inv`. They have no module of their own."""

_ONE_FLOAT = [[stored] for stored in STORED_NAMES.values()]
"""The types of the scales of an FP8 weight."""

_USUAL_BLOCK = (128, 128)
"""Rows and columns per FP8 scale where the config does not name them."""

_GROUPS = (128, 64, 32)
"""Group sizes of MLX's affine format, the largest first, because larger groups need fewer scales."""


@dataclass(frozen=True, kw_only=True)
class PackedSource(Source):
    """The source of a packed weight: `stored` has the names of its `weight` member, `members` those of the others."""

    form: Form
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
    layout = foreign.fields.get("checkpoint_format") or foreign.fields.get("version") or "gptq"
    problem = ""
    if foreign.fields.get("transform_config"):
        problem = "transform_config rotates the activations, which is not supported"
    elif foreign.name == "AWQ" or "awq" in str(foreign.fields.get("packing_format")):
        instead = "Convert it with mlx_lm.convert, then add the head of the unquantized model with mtp-coord add-mtp"
        raise CheckpointError(f"{checkpoint.path / 'config.json'}: AWQ is not read. {instead}")
    elif foreign.name == "GPTQ" and layout not in ("gptq", "gptq_v2"):
        problem = f"the layout {layout!r:.40} is not supported, only gptq and gptq_v2"
    if problem:
        raise CheckpointError(f"{checkpoint.path / 'config.json'}: {problem}. {_INSTEAD}")
    tensors = checkpoint.tensors
    plans = {part: _plan_part(plan, tensors) for part, plan in checkpoint.plans.items()}
    return replace(checkpoint, plans=plans)


_INSTEAD = "Convert the unquantized checkpoint, or one in FP8."


def _plan_part(plan: dict[str, Source], tensors: dict[str, TensorInfo]) -> dict[str, Source]:
    """Return the plan of a part with the members of each packed weight joined."""
    modules: dict[str, dict[str, Source]] = defaultdict(dict)
    found: dict[str, Source] = {}
    for name, source in plan.items():
        for module, leaf in _split(name):
            if leaf in MEMBERS:
                modules[module][leaf] = source
            elif not _OF_ACTIVATIONS.fullmatch(leaf):
                found[name] = source
    for module, leaves in modules.items():
        known = {leaf: tensors.get(source.stored[0]) for leaf, source in leaves.items()}
        types = {leaf: info.dtype for leaf, info in known.items() if info is not None}
        found[f"{module}.weight".removeprefix(".")] = join_members(leaves, types)
    return found


def _split(name: str) -> list[tuple[str, str]]:
    """Return the module and leaf of a name within a part. A member of fused experts belongs to two modules."""
    fused = _FUSED.fullmatch(name)
    if fused is None:
        module, _, leaf = name.rpartition(".")
        return [(module, leaf)]
    projections = ("gate", "up") if fused[2] == "gate_up" else ("down",)
    leaf = fused[3] if fused[3] in MEMBERS else f"weight_{fused[3]}"
    return [(f"{fused[1]}.switch_mlp.{projection}_proj", leaf) for projection in projections]


def join_members(leaves: dict[str, Source], types: dict[str, str]) -> Source:
    """Return the source of a weight from the stored names of its members and their `types`, packed or not."""
    form: Form
    match types:
        case {"qweight": "I32", "scales": _, "qzeros": "I32"}:
            form = "gptq"
        case {"weight": "F8_E4M3", **scales} if [*scales.values()] in _ONE_FLOAT:
            form = "fp8"
        case {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": _}:
            form = "nvfp4"
        case {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": _}:
            form = "nvfp4"
        case _ if [*leaves] == ["weight"]:
            return leaves["weight"]
        case _:
            name = next(iter(leaves.values())).stored[0]
            raise CheckpointError(
                f"tensor {name} is packed in a way that is not supported, or is incomplete: its weight has "
                f"{', '.join(map(' as '.join, types.items()))}. {_INSTEAD}"
            )
    names = {MEMBERS[leaf]: source.stored for leaf, source in leaves.items()}
    source = next(source for leaf, source in leaves.items() if MEMBERS[leaf] == "weight")
    stored = names.pop("weight")
    return PackedSource(stored, source.transform, form=form, members=names)


Members = dict[Member, mx.array]
Affine = tuple[dict[str, mx.array], dict[str, Any]]
"""A weight in MLX's affine format: its parameters, and its `group_size`, `bits` and `mode`."""


def read_source_part(
    checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None, *, keep_codes: bool = False
) -> tuple[dict[str, mx.array], dict[str, dict[str, Any]]]:
    """Return the weights of a part as `read_part` does, with packed ones dequantized. Raises CheckpointError.

    With `keep_codes` weights of integers have MLX's affine format. Also returns that format by module.
    """
    if missing := checkpoint.missing_sources(part):
        raise checkpoint.missing_tensors_error(missing)
    plan = checkpoint.plans[part]
    packed = {name: source for name, source in plan.items() if isinstance(source, PackedSource)}
    plain = {part: {name: source for name, source in plan.items() if name not in packed}}
    weights = read_part(replace(checkpoint, plans=plain), part, dtype)
    forms: dict[str, dict[str, Any]] = {}
    files: Files = {}
    types = {stored: getattr(mx, name) for name, stored in STORED_NAMES.items()}
    wanted: mx.Dtype = dtype or types.get(checkpoint.norm_type, mx.bfloat16)
    for name, source in packed.items():
        assert checkpoint.config.foreign is not None
        fields = checkpoint.config.foreign.fields
        members: Members = {}
        for member, names in (("weight", source.stored), *source.members.items()):
            arrays = [checkpoint.load_tensor(stored, files) for stored in names]
            members[member] = stack(*arrays) if source.transform is stack else arrays[0]
        try:
            if keep_codes and source.form == "gptq":
                module = name.removesuffix(".weight")
                parameters, forms[module] = affine_weight(members, fields, wanted)
                weights |= {f"{module}.{leaf}": array for leaf, array in parameters.items()}
            else:
                values = packed_values(source.form, members, fields)
                if source.transform in (gate_half, up_half):
                    values = source.transform(values)
                weights[name] = values.astype(wanted)
        except ValueError as error:
            raise CheckpointError(f"tensor {source.stored[0]} cannot be unpacked: {error}. {_INSTEAD}") from error
    return weights, forms


def packed_values(form: Form, members: Members, fields: dict[str, Any]) -> mx.array:
    """Return the weight `[outputs, inputs]` in float32. Raises ValueError for members that do not fit together."""
    weight = members["weight"]
    match form:
        case "fp8":
            scale = members["scale"].astype(mx.float32)
            return mx.from_fp8(_bytes(weight), mx.float32) * _widen(scale, weight.shape, fields)
        case "nvfp4":
            words = _bytes(weight).view(mx.uint32)
            values = mx.dequantize(words, members["scale"], mode="nvfp4", dtype=mx.float32)
            if "divisor" in members:
                return values * _broadcast(1 / members["divisor"].astype(mx.float32), weight)
            return values * _broadcast(members["factor"].astype(mx.float32), weight)
        case _:
            found, affine = affine_weight(members, fields, mx.float32)
            words, scales, biases = found["weight"], found["scales"], found["biases"]
            plain: mx.array = mx.dequantize(words, scales, biases, **affine)
            return plain


def _broadcast(scale: mx.array, weight: mx.array) -> mx.array:
    """Return scales of whole weights with the axes of the weight, which has one further for experts."""
    return scale.reshape(*scale.shape, *(1,) * (weight.ndim - scale.ndim))


def _widen(scale: mx.array, shape: tuple[int, ...], fields: dict[str, Any]) -> mx.array:
    """Return FP8 scales so that they multiply a weight of `shape`: one for a block, a row or the whole weight."""
    block = fields.get("weight_block_size") or _USUAL_BLOCK
    scale = scale.reshape(*scale.shape, *(1,) * (len(shape) - scale.ndim))
    if not (isinstance(block, list | tuple) and [type(n) for n in block] == [int, int]):
        raise ValueError(f"weight_block_size is {block!r:.60}, not two integers")
    rows, columns = shape[-2:]
    if scale.shape[-2:] in ((1, 1), (rows, 1)):
        return scale
    if scale.shape[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"FP8 scales of {scale.shape} do not fit a weight of {shape} in blocks of {block}")
    scale = mx.repeat(scale, block[0], axis=-2)[..., :rows, :]
    return mx.repeat(scale, block[1], axis=-1)[..., :columns]


def _bytes(values: mx.array) -> mx.array:
    return mx.contiguous(values).view(mx.uint8)


def affine_weight(members: Members, fields: dict[str, Any], dtype: mx.Dtype) -> Affine:
    """Return a weight of integers in MLX's affine format with its own codes and scales. Raises ValueError."""
    weight, zeros = members["weight"], members["zeros"]
    # Rounded before the biases are computed from it, so that a code at the zero point stays near 0.
    scale = members["scale"].astype(dtype).astype(mx.float32)
    bits = 32 * zeros.shape[-1] // scale.shape[-1]
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits are not supported")
    # A word of GPTQ has adjacent inputs of one output, the first in the lowest bits, as a word of MLX.
    words = mx.contiguous(weight.swapaxes(-1, -2)).view(mx.uint32)
    places = mx.arange(0, 32, bits, dtype=mx.uint32)
    points = (zeros.view(mx.uint32)[..., None] >> places) & ((1 << bits) - 1)
    points = points.reshape(*zeros.shape[:-1], -1)[..., : scale.shape[-1]]
    points = (points + _zero_offset(fields)) & ((1 << bits) - 1)
    scales = scale.swapaxes(-1, -2)
    biases = -points.swapaxes(-1, -2).astype(mx.float32) * scales
    size, rest = divmod(words.shape[-1] * 32 // bits, scales.shape[-1])
    group = next((group for group in _GROUPS if size % group == 0), None)
    if rest or group is None:
        raise ValueError(f"groups of {size} inputs are not supported, only multiples of 32")
    if "order" in members:
        adjacent = mx.arange(size * scales.shape[-1]) // size
        if not mx.all(members["order"] == adjacent).item():
            raise ValueError("its inputs are in another order (desc_act), which is not supported")
    scales, biases = (mx.repeat(part, size // group, axis=-1) for part in (scales, biases))
    found = {"weight": words, "scales": scales.astype(dtype), "biases": biases.astype(dtype)}
    return found, {"group_size": group, "bits": bits, "mode": "affine"}


def _zero_offset(fields: dict[str, Any]) -> int:
    """Return what is added to stored zero points: GPTQ's first layout stores one less, and AutoRound copies it."""
    layout = str(fields.get("packing_format") or fields.get("checkpoint_format") or "gptq")
    return int("gptq" in layout and layout != "gptq_v2" and "gptqmodel" not in layout)
