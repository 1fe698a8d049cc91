"""The settings of a conversion, and the weights as an MLX checkpoint stores them: named, cast, quantized, and lazy.

The modules are mlx-lm's own, so mlx-lm decides their names and which of them can be quantized. Shapes and types of the
lazy weights are known at once. Evaluating a weight reads its tensor and packs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder

from mtp.checkpoint.convert.unpack import Repacked, read_source_part
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.names import module_path
from mtp.checkpoint.format.parts import check_rows, load_tensor, missing_from_backbone
from mtp.checkpoint.format.shard import Entry
from mtp.vision.tower import PATCHES, has_tower, tower_weights
from proto.errors import CheckpointError, UsageError
from proto.wire import STORED_NAMES

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
Recipe = Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]
FloatType = Literal["float16", "bfloat16", "float32"]
HeadBits = Literal["none", "2", "3", "4", "5", "6", "8"]

_USUAL: dict[Mode, tuple[int, int]] = {
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "nvfp4": (16, 4),
    "mxfp8": (32, 8),
}
"""Default group size and bits of each mode. Only affine allows other values."""

TABLE_GROUP = 32
"""Weights of a scale in rows that stay on disk: 160 of Flash-Next are no multiple of 64."""

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """The quantization of a module in groups of `group_size` weights. Raises UsageError where MLX has no kernels."""

    bits: int
    group_size: int
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        if self.mode == "affine":
            if self.bits not in _AFFINE_BITS:
                raise UsageError(
                    f"{self.bits} bits are not supported. Choose one of {_listed(_AFFINE_BITS)}."
                )
            if self.group_size not in _AFFINE_GROUPS:
                raise UsageError(
                    f"groups of {self.group_size} are not supported. Choose one of {_listed(_AFFINE_GROUPS)}."
                )
        elif (self.group_size, self.bits) != _USUAL[self.mode]:
            group_size, bits = _USUAL[self.mode]
            raise UsageError(
                f"{self.mode} has {bits} bits in groups of {group_size}. Leave out --q-bits and --q-group-size."
            )

    @classmethod
    def of(cls, bits: int | None, group_size: int | None, mode: Mode = "affine") -> Quantization:
        """Return a quantization with the default values of `mode` in place of None."""
        usual_group, usual_bits = _USUAL[mode]
        return cls(bits or usual_bits, group_size or usual_group, mode)

    def to_json(self) -> dict[str, int | str]:
        """Return the object that config.json holds."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class Settings:
    """The settings of a conversion.

    None means unquantized for `quantization`, each tensor's own type for `dtype`, and those of the backbone for the
    head. The vision part, which `vision` keeps, is not quantized.
    """

    quantization: Quantization | None = None
    recipe: Recipe | None = None
    dtype: FloatType | None = None
    head_bits: HeadBits | None = None
    head_dtype: FloatType | None = None
    vision: bool = True

    def __post_init__(self) -> None:
        if self.recipe and (self.quantization is None or self.quantization.mode != "affine"):
            raise UsageError(f"--quant-predicate {self.recipe} needs -q and --q-mode affine")

    @property
    def head_quantization(self) -> Quantization | None:
        """The quantization of the head's layer, unless a recipe overrides it; None leaves the layer unquantized."""
        if self.head_bits is None:
            return self.quantization
        if self.head_bits == "none":
            return None
        group = self.quantization.group_size if self.quantization else None
        affine = self.quantization is None or self.quantization.mode == "affine"
        return Quantization.of(int(self.head_bits), group if affine else None)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


SAFETENSORS: dict[mx.Dtype, str] = {
    **{getattr(mx, name): stored for name, stored in STORED_NAMES.items()},
    mx.uint32: "U32",
    mx.uint8: "U8",
}
"""The types weights of a converted checkpoint have, as safetensors names them."""

Choice = bool | dict[str, Any]
Predicate = Callable[[str, nn.Module], Choice]


@dataclass
class Group:
    """The tensors of one module, computed together. `way` is how a packed module got its format; empty otherwise."""

    entries: list[Entry]
    arrays: list[mx.array]
    way: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the group."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass
class ConvertedWeights:
    """The groups of `backbone`, `head` and `vision` in writing order, and the `quantization` object or None."""

    backbone: list[Group]
    head: list[Group]
    vision: list[Group]
    quantization: dict[str, Any] | None


def convert_weights(checkpoint: Checkpoint, settings: Settings) -> ConvertedWeights:
    """Return the weights of the MLX checkpoint, without an incomplete head. Raises CheckpointError.

    Weights that another program packed keep their bits where MLX has their format, unless `settings` ask for fewer.
    """
    config = checkpoint.config
    if config.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path}: is quantized already. Convert from the checkpoint that Qwen publishes."
        )
    if checkpoint.unknown:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {checkpoint.unknown[0]} belongs to no part of this model "
            f"({len(checkpoint.unknown)} in total): config.json may belong to another checkpoint. Download both again."
        )
    if settings.recipe and config.family.is_own:
        raise UsageError(
            f"--quant-predicate: mlx-lm has no {settings.recipe} for {config.family.releases}. Use -q alone."
        )
    check_rows(checkpoint)
    if missing := missing_from_backbone(checkpoint):
        raise checkpoint.missing_tensors_error(missing)
    with_head = checkpoint.mtp.complete
    model = config.backbone()
    if with_head:
        model.mtp = config.head()
    prefix = config.family.prefix
    packed = _load(checkpoint, model, settings, with_head)
    kept = {path: module for path, module in packed.items() if module is not None}
    found = _quantize(model, prefix, settings, {path: module.form for path, module in kept.items()})
    parameters = _with_kept(dict(tree_flatten(model.parameters())), kept)
    parameters |= _tables(checkpoint, settings)
    parameters = {prefix + name: weight for name, weight in parameters.items()}
    backbone = {n: w for n, w in parameters.items() if not n.startswith(f"{prefix}mtp.")}
    head = {n: w for n, w in parameters.items() if n not in backbone}
    vision = _vision(checkpoint, settings) if settings.vision and has_tower(checkpoint) else {}
    groups = ConvertedWeights(
        group_parameters(backbone), group_parameters(head), group_parameters(vision), found
    )
    for group in groups.backbone + groups.head:
        path = group.entries[0].name.rpartition(".")[0].removeprefix(prefix)
        if path in packed:
            group.way = _way(group, packed[path])
    return groups


def _tables(checkpoint: Checkpoint, settings: Settings) -> dict[str, mx.array]:
    """Return the rows that stay on disk, under the names of MLX checkpoints. A quantized row has groups of 32."""
    found: dict[str, mx.array] = {}
    wanted = settings.quantization
    dtype: mx.Dtype | None = getattr(mx, settings.dtype) if settings.dtype else None
    for part, kinds in checkpoint.tables.items():
        for number, name in enumerate(kinds["weight"]):
            rows = load_tensor(checkpoint, name, {})
            rows = rows if dtype is None else rows.astype(dtype)
            base = f"model.{part}.ple.ple_embedding.ngram_embedding.shards.{number}"
            if wanted is None or rows.shape[1] % TABLE_GROUP:
                found[f"{base}.weight"] = rows
                continue
            packed = mx.quantize(rows, TABLE_GROUP, wanted.bits)
            kinds_of = ("weight", "scales", "biases")
            found |= {f"{base}.{kind}": a for kind, a in zip(kinds_of, packed, strict=True)}
    return found


def _vision(checkpoint: Checkpoint, settings: Settings) -> dict[str, mx.array]:
    """Return the vision part under mlx-vlm's names, which mlx-lm leaves out."""
    weights = tower_weights(checkpoint)
    patches = weights.get(PATCHES)
    if patches is not None and patches.ndim == 5 and checkpoint.layout == "raw":
        weights[PATCHES] = patches.transpose(0, 2, 3, 4, 1)
    dtype: mx.Dtype | None = getattr(mx, settings.dtype) if settings.dtype else None
    named = {f"vision_tower.{name}": weight for name, weight in sorted(weights.items())}
    return {name: w if dtype is None else w.astype(dtype) for name, w in named.items()}


def _load(
    checkpoint: Checkpoint, model: nn.Module, settings: Settings, with_head: bool
) -> dict[str, Repacked | None]:
    """Replace the weights of the modules, which are never computed, by the lazy weights of the checkpoint.

    Returns the modules that another program packed, by path, with the parameters that keep their bits or None. The
    model has their dequantized weights.
    """
    weights: list[tuple[str, mx.array]] = []
    packed: dict[str, Repacked | None] = {}
    for part in checkpoint.plans:
        tied = part == "lm_head" and checkpoint.config.tie_word_embeddings
        if tied or (part == "mtp" and not with_head):
            continue
        name = settings.head_dtype or settings.dtype if part == "mtp" else settings.dtype
        dtype: mx.Dtype | None = getattr(mx, name) if name else None
        inside = "" if part in ("lm_head", "mtp") else "model."
        plain, repacked = read_source_part(checkpoint, part, dtype)
        weights += [(f"{inside}{module_path(part, name)}", w) for name, w in plain.items()]
        for within, module in repacked.items():
            path = f"{inside}{module_path(part, within)}".removesuffix(".weight")
            packed[path] = module if _keeps(module, settings, in_head=part == "mtp") else None
    try:
        model.load_weights(weights)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return packed


def _keeps(module: Repacked | None, settings: Settings, *, in_head: bool) -> bool:
    """Return whether a repacked module keeps its bits. More bits would add an error and no precision."""
    if module is None or settings.recipe or (in_head and settings.head_bits == "none"):
        return False
    wanted = settings.head_quantization if in_head else settings.quantization
    return wanted is None or module.form["bits"] <= wanted.bits


def _with_kept(parameters: dict[str, mx.array], kept: dict[str, Repacked]) -> dict[str, mx.array]:
    """Return the parameters with those of the modules that keep their bits, in the same order."""
    found: dict[str, mx.array] = {}
    for name, array in parameters.items():
        path = name.removesuffix(".weight")
        leaves = kept[path].parameters if path in kept else {}
        found |= {f"{path}.{leaf}": weight for leaf, weight in leaves.items()} or {name: array}
    return found


def _way(group: Group, module: Repacked | None) -> str:
    """Return how a module that another program had packed got its format."""
    if module is not None:
        return f"repacked in {module.form['bits']} bit {module.form['mode']}, with the same codes"
    return "dequantized" if len(group.entries) == 1 else "dequantized and quantized anew"


def group_parameters(parameters: dict[str, mx.array]) -> list[Group]:
    """Return the parameters grouped by module, in their order."""
    groups = []
    for _, members in groupby(parameters.items(), key=lambda item: item[0].rpartition(".")[0]):
        tensors = list(members)
        entries = [Entry(n, SAFETENSORS[w.dtype], tuple(w.shape)) for n, w in tensors]
        groups.append(Group(entries, [w for _, w in tensors]))
    return groups


# ---- the choice of quantization


def _quantize(
    model: nn.Module, prefix: str, settings: Settings, kept: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """Quantize `model` in place, lazily. Returns the object for config.json: the default, and the overrides by path.

    Paths in config.json begin with `prefix`. The same predicate decides for backbone and head; a module of the head
    counts as the same module of layer 0. The modules of `kept` have a format already.
    """
    of_backbone, of_head = settings.quantization, settings.head_quantization
    default = of_backbone or of_head
    if default is None:
        forms = list(kept.values())
        usual = max(forms, key=lambda form: (forms.count(form), forms.index(form)), default={})
        return _with_overrides(dict(usual), prefix, kept) if kept else None
    found: dict[str, Any] = default.to_json()
    follows = settings.head_bits is None
    choose = _predicate(model, settings)
    routers = _routers(model)

    def choice_for(path: str, module: nn.Module) -> Choice:
        """Return how to quantize the module at `path`, and record an override in `found`."""
        in_head = path.startswith("mtp.")
        mine = of_head if in_head else of_backbone
        if path in kept or mine is None or path == "mtp.fc" or not hasattr(module, "to_quantized"):
            return False
        twin = path.replace("mtp.", "model.", 1) if in_head else path
        choice = choose(twin, module) if follows or not in_head else routers(twin, module)
        if choice is True and mine != default:
            choice = mine.to_json()
        group = choice.get("group_size", mine.group_size) if isinstance(choice, dict) else None
        if module.weight.shape[-1] % (group or mine.group_size):
            return False
        if isinstance(choice, dict):
            found[prefix + path] = choice
        return choice

    size, bits = default.group_size, default.bits
    nn.quantize(model, size, bits, mode=default.mode, class_predicate=choice_for)
    return _with_overrides(found, prefix, kept)


def _with_overrides(
    found: dict[str, Any], prefix: str, kept: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the object `found` with the formats of `kept` that differ from its default."""
    default = {name: found[name] for name in ("group_size", "bits", "mode")}
    return found | {prefix + path: form for path, form in kept.items() if form != default}


def _predicate(model: nn.Module, settings: Settings) -> Predicate:
    """Return mlx-lm's predicate, or that of one of its recipes; routers stay at 8 bits under every recipe."""
    routers = _routers(model)
    if settings.recipe is None:
        return routers
    assert settings.quantization is not None
    # The annotation in mlx-lm has a third argument that no caller passes.
    size = settings.quantization.group_size
    recipe = cast(Predicate, mixed_quant_predicate_builder(settings.recipe, model, size))

    def choose(path: str, module: nn.Module) -> Choice:
        """Return the routers' own choice, or else that of the recipe."""
        choice = routers(path, module)
        return choice if isinstance(choice, dict) else recipe(path, module)

    return choose


def _routers(model: nn.Module) -> Predicate:
    predicate: Predicate | None = model.quant_predicate
    return predicate or (lambda path, module: True)
