"""The conversion of a raw checkpoint to an MLX one that keeps its MTP head, one module at a time.

`config.json` is written last, so no program loads an unfinished conversion. The modules are mlx-lm's own, which decide
the names and what can be quantized. Evaluating a lazy weight reads its tensor and packs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mtp.checkpoint.convert.foreign import read_source_part
from mtp.checkpoint.format.checkpoint import INDEX, Checkpoint
from mtp.checkpoint.format.config import QUANTIZATION_FILE
from mtp.checkpoint.format.parts import missing_from_backbone
from mtp.checkpoint.format.shard import Entry, ShardWriter, check_free_space, replace_bytes
from mtp.layers.linear import Format
from mtp.vision.tower import PATCHES, has_tower, tower_weights
from proto.errors import CheckpointError, UsageError
from proto.terminal.progress import OnProgress
from proto.wire import STATE_NAMES

SHARD_BYTES = 2 * 1024**3
"""Bytes. Approximate size of a shard."""

HEAD_FILE = "mtp.safetensors"
"""The file of the MTP head, which mlx-lm does not read. In `model*.safetensors` an `mtp.` tensor would make mlx-lm up
to 0.31.3 shift the norms of the backbone a second time."""

_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_BESIDE = (
    "config.json",
    QUANTIZATION_FILE,
    "quantize_config.json",
    "quantization_config.json",
    INDEX,
    "*preprocessor_config.json",
)
"""The files that are copied: those of the tokenizer, not those that describe weights. PROCESSOR follows the tower."""


Group = dict[str, mx.array]
"""The tensors of one module by name, computed together."""


def cut_shards(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    """Split `groups` into shards of about `limit` bytes; a group is never split."""
    shards: list[list[Group]] = []
    size = limit
    for group in groups:
        nbytes = sum(array.nbytes for array in group.values())
        if size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += nbytes
    return shards


def shard_writer(path: Path, groups: Sequence[Group]) -> ShardWriter:
    """Return the writer of a file with the tensors of `groups`."""
    arrays = [item for group in groups for item in group.items()]
    return ShardWriter(path, [Entry(n, SAFETENSORS[a.dtype], tuple(a.shape)) for n, a in arrays])


def write_shard(writer: ShardWriter, groups: list[Group], on_bytes: Callable[[int], object]) -> None:
    """Compute, write and release group after group, and call `on_bytes` after each. `groups` is empty then."""

    def write_all() -> None:
        writer.rewind(0)  # an earlier run may have left bytes, which have no hash
        groups.reverse()
        while groups:
            before = writer.written
            arrays = list(groups.pop().values())
            mx.eval(arrays)
            for array in arrays:
                flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
                writer.write(np.array(flat, copy=False).data)
            on_bytes(writer.written - before)
            del arrays, array, flat
            mx.clear_cache()

    writer.complete(write_all)


def save_index(path: Path, nbytes: int, weight_map: dict[str, str]) -> None:
    """Write the index of `nbytes` of tensors, from tensor name to file name, into the directory `path`."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    replace_bytes(path / INDEX, json.dumps(index, indent=2).encode())


def save_config(path: Path, config: dict[str, Any]) -> None:
    """Write config.json with sorted keys, as mlx-lm writes it."""
    text = json.dumps(dict(sorted(config.items())), indent=2)
    replace_bytes(path / "config.json", text.encode())


VISION_FILE, PROCESSOR = "model-vision.safetensors", "preprocessor_config.json"
"""The file of the vision part, by a name that mlx-lm and mlx-vlm read, and that of the image processor."""


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion, with the types of its tensors."""

    path: Path
    nbytes: int
    has_head: bool
    dtypes: tuple[str, ...]


def convert(
    source: Checkpoint,
    path: Path,
    settings: Settings,
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionResult:
    """Convert `source` into the directory `path`. The peak memory is that of the largest module and its tensors.

    Raises UsageError when `path` holds something else, and CheckpointError for the source or a full disk.
    """
    if source.mtp.present and not source.mtp.complete:
        raise CheckpointError(
            f"{source.path}: tensor {source.mtp.missing[0]} of the MTP head is missing. Download the checkpoint again."
        )
    weights = convert_weights(source, settings)
    has_vision = bool(weights.vision)  # the groups are released as they are written
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path}: exists already. Give a new directory, or remove it.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be created: {error.strerror or error}") from error
    nbytes, dtypes = _write(path, weights, on_progress, shard_bytes)
    for file in (file for pattern in _BESIDE for file in source.path.glob(pattern)):
        if not any(file.match(name) for name in _NOT_BESIDE):
            replace_bytes(path / file.name, file.read_bytes())
    processor = source.path / PROCESSOR
    if has_vision and processor.is_file():
        replace_bytes(path / PROCESSOR, processor.read_bytes())
    save_config(path, _config(source, weights, has_vision))
    return ConversionResult(path, nbytes, source.mtp.complete, dtypes)


def _write(
    path: Path, weights: ConvertedWeights, on_progress: OnProgress, shard_bytes: int
) -> tuple[int, tuple[str, ...]]:
    """Write the files and the index. Return the bytes and the types."""
    shards = cut_shards(weights.backbone, shard_bytes)
    suffix = f"of-{len(shards):05}.safetensors"
    files = {f"model-{number:05}-{suffix}": shard for number, shard in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    if weights.head:
        files[HEAD_FILE] = weights.head
    if weights.vision:
        files[VISION_FILE] = weights.vision
    writers = {name: shard_writer(path / name, groups) for name, groups in files.items()}
    dtypes = {entry.dtype for writer in writers.values() for entry in writer.entries}
    total = sum(writer.nbytes for writer in writers.values())
    check_free_space(path, total)
    done = 0

    def on_bytes(written: int) -> None:
        nonlocal done
        done += written
        on_progress(done, total)

    on_progress(done, total)
    weights.backbone, weights.head, weights.vision = [], [], []
    for name, groups in files.items():
        write_shard(writers[name], groups, on_bytes)
    weight_map = {entry.name: file for file, writer in writers.items() for entry in writer.entries}
    save_index(path, total, weight_map)
    return total, tuple(sorted(dtypes))


def _config(source: Checkpoint, weights: ConvertedWeights, has_vision: bool) -> dict[str, Any]:
    """Return the source's config.json, updated for the head, the quantization and a vision part that is left out."""
    config: dict[str, Any] = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    if not has_vision:
        config.pop("vision_config", None)
    text = config.get("text_config", config)
    for key in ("_name_or_path", "quantization_config"):
        config.pop(key, None)
        text.pop(key, None)
    if not source.config.family.as_published:
        text["mtp_num_hidden_layers"] = int(source.mtp.complete)
        # mlx-lm does not read the places that older exporters used.
        text["rope_parameters"] = source.config.text_config["rope_parameters"]
        source.config.family.convert_text(text)
    if weights.quantization is not None:
        config["quantization"] = config["quantization_config"] = weights.quantization
    return config


Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
FloatType = Literal["float16", "bfloat16", "float32"]

_SUPPORTED: dict[Mode, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}
"""The group sizes and the bits that MLX has kernels for, the default first."""


@dataclass(frozen=True)
class Quantization:
    """The quantization of a module in groups of `group_size` weights. Raises UsageError where MLX has no kernels."""

    bits: int
    group_size: int
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        given = {"--q-group-size": self.group_size, "--q-bits": self.bits}
        for (flag, value), supported in zip(given.items(), _SUPPORTED[self.mode], strict=True):
            if value not in supported:
                choices = " or ".join(map(str, sorted(supported)))
                raise UsageError(f"{flag} {value}: {self.mode} has {choices}. Choose one of them.")

    @classmethod
    def of(cls, bits: int | None, group_size: int | None, mode: Mode = "affine") -> Quantization:
        """Return a quantization with the default values of `mode` in place of None."""
        (usual_group, *_), (usual_bits, *_) = _SUPPORTED[mode]
        return cls(bits or usual_bits, group_size or usual_group, mode)


@dataclass(frozen=True)
class Settings:
    """The settings of a conversion. The vision part, which `vision` keeps, is not quantized.

    None means unquantized for `quantization`, and each tensor's own type for `dtype`.
    """

    quantization: Quantization | None = None
    dtype: FloatType | None = None
    vision: bool = True

    def cast(self, weight: mx.array) -> mx.array:
        """Return `weight` in `dtype`."""
        return weight if self.dtype is None else weight.astype(getattr(mx, self.dtype))


SAFETENSORS: dict[mx.Dtype, str] = {getattr(mx, name): stored for name, stored in STATE_NAMES.items()}
"""The types weights of a converted checkpoint have, as safetensors names them."""

Choice = bool | dict[str, Any]


@dataclass
class ConvertedWeights:
    """The groups of `backbone`, `head` and `vision` in writing order, and the `quantization` object or None."""

    backbone: list[Group]
    head: list[Group]
    vision: list[Group]
    quantization: dict[str, Any] | None


def convert_weights(checkpoint: Checkpoint, settings: Settings) -> ConvertedWeights:
    """Return the weights of the MLX checkpoint, without an incomplete head. Raises CheckpointError.

    Weights that another program packed as integers keep their codes. `settings` decide for all others.
    """
    config = checkpoint.config
    if config.quantization is not None and not checkpoint.is_raw:
        raise CheckpointError(f"{checkpoint.path}: is quantized already. Convert from the checkpoint of its publisher.")
    checkpoint.check_names()
    if missing := missing_from_backbone(checkpoint):
        raise checkpoint.missing_tensors_error(missing)
    with_head = checkpoint.mtp.complete
    model = config.backbone()
    if with_head:
        model.mtp = config.head()
    prefix = config.family.prefix
    kept = _load(checkpoint, model, settings, with_head)
    found = _quantize(model, prefix, settings, kept)
    bits = settings.quantization.bits if settings.quantization else None
    on_disk = config.family.convert_on_disk(checkpoint, settings.cast, bits)
    parameters = dict(tree_flatten(model.parameters())) | on_disk
    parameters = {prefix + name: weight for name, weight in parameters.items()}
    backbone = {n: w for n, w in parameters.items() if not n.startswith(f"{prefix}mtp.")}
    head = {n: w for n, w in parameters.items() if n not in backbone}
    vision = _vision(checkpoint, settings) if settings.vision and has_tower(checkpoint) else {}
    backbone_groups, head_groups, vision_groups = map(group_parameters, (backbone, head, vision))
    return ConvertedWeights(backbone_groups, head_groups, vision_groups, found)


def _vision(checkpoint: Checkpoint, settings: Settings) -> dict[str, mx.array]:
    """Return the vision part under mlx-vlm's names, which mlx-lm leaves out."""
    weights = tower_weights(checkpoint)
    patches = weights.get(PATCHES)
    if patches is not None and patches.ndim == 5 and checkpoint.layout == "raw":
        weights[PATCHES] = patches.transpose(0, 2, 3, 4, 1)
    return {f"vision_tower.{name}": settings.cast(w) for name, w in sorted(weights.items())}


def _load(checkpoint: Checkpoint, model: nn.Module, settings: Settings, with_head: bool) -> dict[str, dict[str, Any]]:
    """Replace the weights of the modules, which are never computed, by the lazy weights of the checkpoint.

    Returns the format of the packed weights that keep their codes by the path of their module.
    """
    dtype: mx.Dtype | None = getattr(mx, settings.dtype) if settings.dtype else None
    weights: list[tuple[str, mx.array]] = []
    kept: dict[str, dict[str, Any]] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for part in checkpoint.plans:
        tied = part == "lm_head" and checkpoint.config.tie_word_embeddings
        if tied or (part == "mtp" and not with_head):
            continue
        found, forms = read_source_part(checkpoint, part, dtype, keep_codes=True)
        path, text = checkpoint.config.family.module_path, checkpoint.config.text_config
        weights += [(path(text, part, name), w) for name, w in found.items()]
        kept |= {path(text, part, name): form for name, form in forms.items()}
        for name in (name.removesuffix(".scales") for name in found if name.endswith(".scales")):
            place = path(text, part, name)
            if place not in kept:
                weight, scales = (found[f"{name}.{leaf}"] for leaf in ("weight", "scales"))
                kept[place] = asdict(Format.stored(weight, scales, modules[place].weight.shape[-1]))
    nn.quantize(model, class_predicate=lambda path, module: kept.get(path, False))
    try:
        model.load_weights(weights)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return kept


def group_parameters(parameters: dict[str, mx.array]) -> list[Group]:
    """Return the parameters grouped by module, in their order."""
    modules = groupby(parameters.items(), key=lambda item: item[0].rpartition(".")[0])
    return [dict(members) for _, members in modules]


# ---- the choice of quantization


def _quantize(
    model: nn.Module, prefix: str, settings: Settings, kept: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """Quantize `model` in place, lazily. Returns the object for config.json: the default, and the overrides by path.

    Paths there begin with `prefix`. The modules of `kept` are quantized already.
    """
    wanted = settings.quantization
    if wanted is None:
        forms = list(kept.values())
        usual = max(forms, key=lambda form: (forms.count(form), forms.index(form)), default={})
        return _with_overrides(dict(usual), prefix, kept) if kept else None
    found: dict[str, Any] = asdict(wanted)
    routers = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def choice_for(path: str, module: nn.Module) -> Choice:
        if path == "mtp.fc" or not hasattr(module, "to_quantized"):
            return False
        choice = routers(path, module)
        group = choice["group_size"] if isinstance(choice, dict) else wanted.group_size
        if module.weight.shape[-1] % group:
            return False
        if isinstance(choice, dict):
            found[prefix + path] = choice
        return choice

    size, bits = wanted.group_size, wanted.bits
    nn.quantize(model, size, bits, mode=wanted.mode, class_predicate=choice_for)
    return _with_overrides(found, prefix, kept)


def _with_overrides(found: dict[str, Any], prefix: str, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the object `found` with the formats of `kept` that differ from its default."""
    default = {name: found[name] for name in ("group_size", "bits", "mode")}
    return found | {prefix + path: form for path, form in kept.items() if form != default}
