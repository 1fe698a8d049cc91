"""The weights of a checkpoint as an MLX checkpoint stores them: named, cast and quantized, but lazy.

The modules are mlx-lm's own, so mlx-lm decides their names and which of them can be quantized. Shapes and types of the
lazy weights are known at once. Evaluating a weight reads its tensor and packs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder

from mtp.checkpoint.convert.packed_modules import (
    Format,
    PackedModule,
    format_of,
    packed_modules,
)
from mtp.checkpoint.convert.settings import Settings
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.format.lazy_weights import read_part
from mtp.checkpoint.format.names import module_path
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.format.shard import Entry
from mtp.head.mtp_head import MTPHead
from mtp.packing.repacked_linear import EXTRAS
from proto.dtype import STORED_NAMES
from proto.errors import CheckpointError

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
    """The tensors of one module. A quantized weight and its scales are computed together.

    `way` is how the module got its format, if another program had packed it; None otherwise. `squares` are its lazy
    sums of squares, of the error and of the source's values; None where the error is not measured.
    """

    entries: list[Entry]
    arrays: list[mx.array]
    way: str | None = None
    squares: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the group."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass
class ConvertedWeights:
    """The groups of `backbone` and `head` in writing order, and the `quantization` object of config.json or None."""

    backbone: list[Group]
    head: list[Group]
    quantization: dict[str, Any] | None

    @property
    def has_extras(self) -> bool:
        """True if a module has parameters that stock mlx-lm does not know."""
        names = [e.name for group in self.backbone + self.head for e in group.entries]
        return any(name.endswith(EXTRAS) for name in names)


def convert_weights(checkpoint: Checkpoint, settings: Settings) -> ConvertedWeights:
    """Return the weights of the MLX checkpoint, without the head if the head is not complete.

    Weights that another program packed keep their bits where MLX has their format and `settings` ask for no other one.
    Raises CheckpointError when tensors are missing or have a wrong shape, and when mlx-lm quantized the source.
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
    if missing := missing_from_backbone(checkpoint):
        raise checkpoint.missing_tensors_error(missing)
    with_head = checkpoint.mtp.complete
    model = config.backbone()
    if with_head:
        model.mtp = MTPHead(config.text_args())
    prefix = config.family.prefix
    packed = _load(checkpoint, model, settings, with_head)
    kept = {path: module.format for path, module in packed.items() if module.kept}
    found = _quantize(model, prefix, settings, kept)
    parameters = _with_kept(dict(tree_flatten(model.parameters())), packed)
    parameters = {prefix + name: weight for name, weight in parameters.items()}
    backbone = {n: w for n, w in parameters.items() if not n.startswith(f"{prefix}mtp.")}
    head = {n: w for n, w in parameters.items() if n not in backbone}
    groups = ConvertedWeights(group_parameters(backbone), group_parameters(head), found)
    for group in groups.backbone + groups.head:
        _measure(group, prefix, packed)
    return groups


def _load(
    checkpoint: Checkpoint, model: nn.Module, settings: Settings, with_head: bool
) -> dict[str, PackedModule]:
    """Replace the weights of the modules, which are never computed, by the lazy weights of the checkpoint.

    Returns the modules that another program packed, by path. The model has their dequantized weights.
    """
    weights: list[tuple[str, mx.array]] = []
    packed: dict[str, PackedModule] = {}
    for part in checkpoint.plans:
        tied = part == "lm_head" and checkpoint.config.tie_word_embeddings
        if tied or (part == "mtp" and not with_head):
            continue
        name = settings.head_dtype or settings.dtype if part == "mtp" else settings.dtype
        dtype: mx.Dtype | None = getattr(mx, name) if name else None
        inside = "" if part in ("lm_head", "mtp") else "model."
        plain = read_part(checkpoint, part, dtype, dequantize=True)
        weights += [
            (f"{inside}{module_path(part, within)}", weight) for within, weight in plain.items()
        ]
        for within, module in packed_modules(checkpoint, part, plain, dtype, settings):
            packed[f"{inside}{module_path(part, within)}"] = module
    try:
        model.load_weights(weights)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return packed


def _with_kept(
    parameters: dict[str, mx.array], packed: dict[str, PackedModule]
) -> dict[str, mx.array]:
    """Return the parameters with those of the modules that keep their bits, in the same order."""
    found: dict[str, mx.array] = {}
    for name, array in parameters.items():
        path = name.removesuffix(".weight")
        kept = packed[path].kept if path in packed else {}
        found |= {f"{path}.{leaf}": weight for leaf, weight in kept.items()} or {name: array}
    return found


def _measure(group: Group, prefix: str, packed: dict[str, PackedModule]) -> None:
    """Set the way and the squares of a group, if another program packed its weight."""
    path = group.entries[0].name.rpartition(".")[0]
    module = packed.get(path.removeprefix(prefix))
    if module is None:
        return
    names = [entry.name.removeprefix(f"{path}.") for entry in group.entries]
    written = dict(zip(names, group.arrays, strict=True))
    found = format_of(written, module.inputs)
    if not found:
        dtype = str(written["weight"].dtype).removeprefix("mlx.core.")
        group.way = f"dequantized to {dtype}"
    else:
        verb = "repacked" if module.kept else "quantized anew"
        group.way = f"{verb} in {found['bits']} bit {found['mode']}"
    group.squares = module.squares(written, found)


def group_parameters(parameters: dict[str, mx.array]) -> list[Group]:
    """Return the parameters group_parameters by module, in their order."""
    groups = []
    for _, members in groupby(parameters.items(), key=lambda item: item[0].rpartition(".")[0]):
        tensors = list(members)
        entries = [Entry(n, SAFETENSORS[w.dtype], tuple(w.shape)) for n, w in tensors]
        groups.append(Group(entries, [w for _, w in tensors]))
    return groups


# ---- the choice of quantization


def _quantize(
    model: nn.Module, prefix: str, settings: Settings, kept: dict[str, Format]
) -> dict[str, Any] | None:
    """Quantize `model` in place, lazily. Returns the object for config.json: the default, and the overrides by path.

    Paths in config.json begin with `prefix`. The same predicate decides for backbone and head; a module of the head
    counts as the same module of layer 0. The modules of `kept` have a format already.
    """
    of_backbone, of_head = settings.quantization, settings.head_quantization
    default = of_backbone or of_head
    if default is None:
        return _with_overrides(_most_common(kept), prefix, kept) if kept else None
    found: dict[str, Any] = default.to_json()
    follows = settings.head_bits is None
    choose = _predicate(model, settings)
    routers = _routers(model)

    def quantize(path: str, module: nn.Module) -> Choice:
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

    nn.quantize(
        model, default.group_size, default.bits, mode=default.mode, class_predicate=quantize
    )
    return _with_overrides(found, prefix, kept)


def _with_overrides(found: dict[str, Any], prefix: str, kept: dict[str, Format]) -> dict[str, Any]:
    """Return the object `found` with the formats of `kept` that differ from its default."""
    default = {name: found[name] for name in ("group_size", "bits", "mode")}
    return found | {prefix + path: form for path, form in kept.items() if form != default}


def _most_common(kept: dict[str, Format]) -> Format:
    formats: list[Format] = list(kept.values())
    _, most = max((formats.count(form), number) for number, form in enumerate(formats))
    return dict(formats[most])


def _predicate(model: nn.Module, settings: Settings) -> Predicate:
    """Return mlx-lm's predicate, or that of one of its recipes; routers stay at 8 bits under every recipe."""
    routers = _routers(model)
    if settings.recipe is None:
        return routers
    assert settings.quantization is not None
    # The annotation in mlx-lm has a third argument that no caller passes.
    recipe = cast(
        Predicate,
        mixed_quant_predicate_builder(settings.recipe, model, settings.quantization.group_size),
    )

    def choose(path: str, module: nn.Module) -> Choice:
        """Return the routers' own choice, or else that of the recipe."""
        choice = routers(path, module)
        return choice if isinstance(choice, dict) else recipe(path, module)

    return choose


def _routers(model: nn.Module) -> Predicate:
    predicate: Predicate | None = model.quant_predicate
    return predicate or (lambda path, module: True)
