"""Checkpoints that other programs packed: the packing of each weight, its tensors, and its bits in a format of MLX.

Only the conversion reads them. A packed weight has several tensors, its members. `open_source` joins them into one
parameter of the plan, `….weight`. The form of a packing follows from the names and types of its tensors. The config
has only what they do not show.

FP8 has a sign, 4 bits of exponent and 3 of fraction (E4M3). FP4 has 1, 2 and 1 (E2M1). A scale of E8M0 is a byte, the
exponent of a power of two plus 127. An integer weight is `scale * (code - zero)`. The functions on arrays are lazy,
except for the values of `order` and of FP8 scales. They take any leading dimensions, such as those of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.config import ForeignPacking
from mtp.checkpoint.format.names import Source
from mtp.checkpoint.format.parts import TRANSFORMS, Files, load_tensor, read_part
from mtp.checkpoint.format.shard import TensorInfo
from proto.errors import CheckpointError
from proto.wire import STORED_NAMES

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


Members = dict[Member, mx.array]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_MX_GROUP = 32
"""Values that share a scale in MXFP8 and MXFP4."""

_MANTISSA_BITS = 23
"""Bits of the fraction of a float32."""

_BITS = (2, 4, 8)
"""Sizes of an integer that never crosses a 32-bit word."""

_AWQ_SHIFTS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""The place in a word of each of its outputs, in units of `bits`, by the size of an integer."""

_AFFINE_GROUPS = (128, 64, 32)
"""Group sizes of MLX's affine format, the largest first, because larger groups need fewer scales."""


@dataclass(frozen=True)
class Repacked:
    """A weight in a format of MLX: its `parameters`, and the `bits`, `group_size` and `mode` of the format."""

    parameters: dict[str, mx.array]
    form: dict[str, Any]


def read_source_part(
    checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None
) -> tuple[dict[str, mx.array], dict[str, Repacked | None]]:
    """Return the weights of a part as `read_part` does, with packed ones dequantized. Raises CheckpointError.

    Also returns the packed weights in a format of MLX, or None where MLX has no format for them. Both are by name.
    """
    if missing := checkpoint.missing_sources(part):
        raise checkpoint.missing_tensors_error(missing)
    plan = checkpoint.plans[part]
    packed = {name: source for name, source in plan.items() if isinstance(source, PackedSource)}
    plain = {part: {name: source for name, source in plan.items() if name not in packed}}
    weights = read_part(replace(checkpoint, plans=plain), part, dtype)
    repacked: dict[str, Repacked | None] = {}
    files: Files = {}
    types = {stored: getattr(mx, name) for name, stored in STORED_NAMES.items()}
    wanted: mx.Dtype = dtype or types.get(checkpoint.norm_type, mx.bfloat16)
    for name, source in packed.items():
        members = read_members(source, lambda stored: load_tensor(checkpoint, stored, files))
        try:
            values = packed_values(source.packing, members)
            found = repack(source.packing, members, wanted)
        except ValueError as error:
            raise CheckpointError(
                f"tensor {source.stored[0]} cannot be unpacked: {error}. Download the checkpoint again."
            ) from error
        weights[name] = _half(source, values).astype(wanted)
        repacked[name] = found and Repacked(
            {leaf: _half(source, array) for leaf, array in found.parameters.items()}, found.form
        )
    return weights, repacked


def read_members(source: PackedSource, load: Callable[[str], mx.array]) -> Members:
    """Return the loaded members of a packed weight, experts stacked, scales and zeros with the axes of the weight."""
    found: Members = {}
    for member, names in (("weight", source.stored), *source.members.items()):
        arrays = [load(name) for name in names]
        array = mx.stack(arrays) if source.transform == "stack" else arrays[0]
        if member not in ("weight", "order"):
            array = array.reshape(*array.shape, *(1,) * (found["weight"].ndim - array.ndim))
        found[member] = array
    return found


def _half(source: PackedSource, array: mx.array) -> mx.array:
    """Return the half of the rows that a source takes of fused experts."""
    return TRANSFORMS[source.transform](array) if source.transform.endswith("half") else array


def packed_values(packing: Packing, members: Members) -> mx.array:
    """Return the weight `[outputs, inputs]` in float32. Raises ValueError for members that do not fit together."""
    weight, scale = members["weight"], _scales(packing, members)
    match packing.form:
        case "fp8":
            block = _fp8_block(packing, scale, weight.shape)
            return mx.from_fp8(_bytes(weight), mx.float32) * _widen(scale, block, weight.shape)
        case "mxfp4":
            return _fp4_values(weight, scale)
        case "nvfp4" if "divisor" in members:
            return _fp4_values(weight, scale) * (1 / members["divisor"].astype(mx.float32))
        case "nvfp4":
            return _fp4_values(weight, scale) * _member(members, "factor").astype(mx.float32)
        case _:
            return _integer_values(packing, members)


def _member(members: Members, member: Member) -> mx.array:
    if member not in members:
        raise ValueError(f"its {member} is missing")
    return members[member]


def _scales(packing: Packing, members: Members) -> mx.array:
    """Return the scales in float32. Their bytes are FP8 in NVFP4, and E8M0 elsewhere."""
    scale = members["scale"]
    if scale.dtype != mx.uint8:
        return scale.astype(mx.float32)
    if packing.form == "nvfp4":
        return mx.from_fp8(scale, mx.float32)
    return (scale.astype(mx.uint32) << _MANTISSA_BITS).view(mx.float32)


def repack(packing: Packing, members: Members, dtype: mx.Dtype) -> Repacked | None:
    """Return the weight in a format of MLX with the same codes, or None when no format holds it. Raises ValueError."""
    match packing.form:
        case "fp8":
            return _repack_fp8(packing, members)
        case "mxfp4":
            words = _bytes(members["weight"]).view(mx.uint32)
            found = {"weight": words, "scales": members["scale"]}
            return Repacked(found, {"group_size": _MX_GROUP, "bits": 4, "mode": "mxfp4"})
        case "nvfp4":
            return None  # MLX's linear layers have no scale per tensor
        case _:
            return _repack_integers(packing, members, dtype)


# ---- floating-point weights


def _repack_fp8(packing: Packing, members: Members) -> Repacked | None:
    """Return FP8 as MXFP8, if all scales are powers of two and groups of 32 inputs share them."""
    weight, scale = members["weight"], _scales(packing, members)
    block, columns = _fp8_block(packing, scale, weight.shape), weight.shape[-1]
    pattern = scale.view(mx.uint32)
    powers = (pattern >> _MANTISSA_BITS).astype(mx.uint8)
    apart = columns % _MX_GROUP or (scale.shape[-1] > 1 and block[1] % _MX_GROUP)
    if apart or mx.any(pattern & ((1 << _MANTISSA_BITS) - 1)).item():
        return None
    wide = _widen(powers, block, weight.shape)[..., ::_MX_GROUP]
    scales = mx.broadcast_to(wide, (*weight.shape[:-1], columns // _MX_GROUP))
    found = {"weight": _bytes(weight).view(mx.uint32), "scales": mx.contiguous(scales)}
    return Repacked(found, {"group_size": _MX_GROUP, "bits": 8, "mode": "mxfp8"})


def _fp8_block(packing: Packing, scale: mx.array, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns that share a scale: blocks, all, a row, or a group of MXFP8."""
    rows, columns = shape[-2:]
    for height, width in (packing.block, (rows, columns), (1, columns), (1, _MX_GROUP)):
        if scale.shape[-2:] == (-(-rows // height), -(-columns // width)):
            return height, width
    raise ValueError(
        f"FP8 scales of shape {scale.shape} do not fit a weight of {shape} in blocks of {packing.block}"
    )


def _widen(scale: mx.array, block: tuple[int, int], shape: tuple[int, ...]) -> mx.array:
    """Return the scales of blocks so that they multiply a weight of `shape`."""
    if scale.shape[-2] > 1:
        scale = mx.repeat(scale, block[0], axis=-2)[..., : shape[-2], :]
    if scale.shape[-1] > 1:
        scale = mx.repeat(scale, block[1], axis=-1)[..., : shape[-1]]
    return scale


def _fp4_values(weight: mx.array, scales: mx.array) -> mx.array:
    """Return E2M1 values `weight [..., n / 2]`, two per byte, times a float32 scale per group."""
    data = _bytes(weight)
    codes = mx.stack([data & 0x0F, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
    table = mx.array([*_E2M1, *(-value for value in _E2M1)], mx.float32)
    group, rest = divmod(codes.shape[-1], scales.shape[-1])
    if rest:
        raise ValueError(f"{scales.shape[-1]} scales do not divide {codes.shape[-1]} values")
    return table[codes] * mx.repeat(scales, group, axis=-1)


def _bytes(values: mx.array) -> mx.array:
    return mx.contiguous(values).view(mx.uint8)


# ---- integer weights

_Integers = tuple[mx.array, int, mx.array, mx.array]
"""The codes `[outputs, inputs]` in uint8, their bits, and scales and zero points `[outputs, groups]` in float32."""


def _integer_values(packing: Packing, members: Members) -> mx.array:
    """Return an integer weight in float32."""
    codes, _, scales, zeros = _read_integers(packing, members)
    if "order" in members:
        groups = members["order"].astype(mx.int32)
        if groups.shape[-1] != codes.shape[-1] or mx.any(groups >= scales.shape[-1]).item():
            raise ValueError("the groups of the inputs (g_idx) do not fit the scales")
        groups = mx.broadcast_to(groups[..., None, :], codes.shape)
        scales, zeros = (mx.take_along_axis(part, groups, axis=-1) for part in (scales, zeros))
    else:
        size = _group_size(codes, scales)
        scales, zeros = (mx.repeat(part, size, axis=-1) for part in (scales, zeros))
    return scales * (codes.astype(mx.float32) - zeros)


def _repack_integers(packing: Packing, members: Members, dtype: mx.Dtype) -> Repacked | None:
    """Return integers in the affine format, with larger groups split; None for groups that it cannot express."""
    codes, bits, scales, zeros = _read_integers(packing, members)
    size = _group_size(codes, scales)
    group = next((group for group in _AFFINE_GROUPS if size % group == 0), None)
    if "order" in members:
        order = members["order"]
        adjacent = mx.arange(codes.shape[-1], dtype=order.dtype) // size
        if not mx.array_equal(order, mx.broadcast_to(adjacent, order.shape)).item():
            return None
    if group is None:
        return None
    # The scale is rounded before the bias is computed, so that a code at the zero point stays near 0.
    scales = scales.astype(dtype)
    biases = (-zeros * scales.astype(mx.float32)).astype(dtype)
    scales, biases = (mx.repeat(part, size // group, axis=-1) for part in (scales, biases))
    found = {"weight": pack_words(codes, bits), "scales": scales, "biases": biases}
    return Repacked(found, {"group_size": group, "bits": bits, "mode": "affine"})


def _group_size(codes: mx.array, scales: mx.array) -> int:
    """Return the inputs that share a scale. Raises ValueError when the groups do not divide the inputs."""
    size, rest = divmod(codes.shape[-1], scales.shape[-1])
    if rest:
        raise ValueError(f"{scales.shape[-1]} groups do not divide {codes.shape[-1]} inputs")
    return size


def _read_integers(packing: Packing, members: Members) -> _Integers:
    """Return the codes of an integer weight. Raises ValueError for members that do not fit together."""
    weight, scale, zeros = members["weight"], _scales(packing, members), members.get("zeros")
    bits = 8
    match packing.form:
        case "gptq":
            bits = _find_bits(members["zeros"], scale.shape[-1])
            codes = unpack_words(weight.swapaxes(-1, -2), bits)
            zeros = unpack_words(members["zeros"], bits).swapaxes(-1, -2)
            scale = scale.swapaxes(-1, -2)
        case "awq":
            bits = _find_bits(weight, scale.shape[-1])
            codes = _awq_codes(weight, bits).swapaxes(-1, -2)
            zeros = _awq_codes(members["zeros"], bits).swapaxes(-1, -2)
            scale = scale.swapaxes(-1, -2)
        case "int8":
            codes = _bytes(weight) ^ 0x80
            zeros = None if zeros is None else _bytes(zeros) ^ 0x80
        case _:
            bits = _find_bits(weight, int(_member(members, "shape").flatten()[-1]))
            codes = unpack_words(weight, bits)
            if zeros is not None:
                zeros = unpack_words(zeros.swapaxes(-1, -2), bits).swapaxes(-1, -2)
    if zeros is None:
        zeros = mx.full(scale.shape, 1 << (bits - 1), mx.float32)
    else:
        offset = mx.array(packing.zero_offset, mx.uint8)
        zeros = zeros[..., : scale.shape[-2], :]  # the last word may have room for more outputs
        zeros = ((zeros + offset) & ((1 << bits) - 1)).astype(mx.float32)
    scale = mx.broadcast_to(scale, (*codes.shape[:-1], scale.shape[-1]))
    return codes, bits, scale, mx.broadcast_to(zeros, scale.shape)


def _find_bits(packed: mx.array, count: int) -> int:
    """Return the bits of `count` integers in each row of `packed`. Raises ValueError for unsupported bits."""
    words = packed.shape[-1]
    found = [bits for bits in _BITS if -(-count * bits // 32) == words]
    if not found:
        raise ValueError(f"{count} integers in {words} words: only 2, 4 and 8 bits are supported")
    return found[-1]


def unpack_words(words: mx.array, bits: int) -> mx.array:
    """Return the codes of `words [..., n]` as uint8 `[..., n * 32 / bits]`."""
    data = _bytes(words)
    if bits == 8:
        return data
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    codes = (data[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], -1)


def pack_words(codes: mx.array, bits: int) -> mx.array:
    """Return the words of uint8 `codes`; the inverse of `unpack_words`."""
    each = 8 // bits
    data = mx.contiguous(codes).reshape(*codes.shape[:-1], -1, each)
    packed = data[..., 0]
    for place in range(1, each):
        packed = packed | (data[..., place] << (place * bits))
    return mx.contiguous(packed).view(mx.uint32)


def _awq_codes(packed: mx.array, bits: int) -> mx.array:
    """Return the codes of `packed [..., n]`, whose words hold adjacent outputs in AWQ's order."""
    if bits not in _AWQ_SHIFTS:
        raise ValueError(f"AWQ with {bits} bits is not supported, only 4 and 8")
    codes = unpack_words(packed, bits).reshape(*packed.shape, 32 // bits)
    return mx.take(codes, mx.array(_AWQ_SHIFTS[bits]), axis=-1).reshape(*packed.shape[:-1], -1)
