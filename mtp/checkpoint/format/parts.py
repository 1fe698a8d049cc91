"""The parts of a checkpoint: their names in mlx-lm, their weights read one tensor at a time, and a report on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mtp.checkpoint.families.parameters import Source, Transform, add_one, as_stored
from mtp.checkpoint.format.checkpoint import Checkpoint, Files
from mtp.checkpoint.format.config import ModelConfig
from mtp.checkpoint.format.cut import Share, share_of
from mtp.checkpoint.format.names import local_name
from proto.errors import CheckpointError
from proto.span import Span
from proto.wire import STORED_NAMES

_FLOATS = tuple(STORED_NAMES.values())
_PACKED = ("U32",)
_SCALES = (*_FLOATS, "U8")
"""Types of quantization scales. The modes other than affine store them as bytes."""


def part_module(config: ModelConfig, part: str) -> nn.Module:
    """Return the unquantized module of a part. Its random weights are lazy and never computed."""
    if (module := config.family.part(config.text(), part)) is not None:
        mx.eval(mx.random.state)
        return module
    match part.partition("."):
        case "embed", _, _:
            module = nn.Embedding(config.vocab_size, config.hidden_size)
        case "norm", _, _:
            module = config.family.norm(config.text())
        case "lm_head", _, _:
            outputs = config.vocab_size // (config.cut.size if config.cuts_vocabulary else 1)
            module = nn.Linear(config.hidden_size, outputs, bias=False)
        case "mtp", _, _:
            module = config.head()
        case _, _, layer:
            module = config.family.layer(config.text(), int(layer))
    # Each random weight adds a lazy split to the generator's key. They would accumulate over the loads of a worker.
    mx.eval(mx.random.state)
    assert module is not None, "a checkpoint whose family has no head has no complete one"
    return module


def missing_tensors(checkpoint: Checkpoint, parts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the tensors that `parts` need and the checkpoint lacks."""
    found: dict[str, None] = {}
    for part in parts:
        plan = checkpoint.plans[part]
        needed = list(dict(tree_flatten(part_module(checkpoint.config, part).parameters())))
        if checkpoint.config.quantization is not None:
            needed += [n for name in plan for n in _beside(checkpoint, part, name)]
        lacking = [checkpoint.config.family.path(part, name) for name in needed if name not in plan]
        found |= dict.fromkeys((*lacking, *checkpoint.missing_sources(part)))
    return tuple(found)


def missing_from_backbone(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the missing tensors of the whole model without its MTP head."""
    whole = Span(0, checkpoint.config.num_layers)
    parts = checkpoint.stage_parts(whole, first=True, last=True, with_head=False)
    return missing_tensors(checkpoint, parts)


def _beside(checkpoint: Checkpoint, part: str, name: str) -> tuple[str, ...]:
    """Return the parameters that `name` requires: a packed weight needs scales, and float scales need biases."""
    module, _, kind = name.rpartition(".")
    source = checkpoint.plans[part][name]
    stored = checkpoint.tensors.get(source.stored[0])
    if stored is None or source.decides_type:
        return ()
    if kind == "weight" and stored.dtype in _PACKED:
        return (f"{module}.scales".removeprefix("."),)
    if kind == "scales" and stored.dtype in _FLOATS:
        return (f"{module}.biases".removeprefix("."),)
    return ()


def check_types(checkpoint: Checkpoint, part: str) -> None:
    """Raise CheckpointError for a tensor of `part` of an invalid type, which would load with wrong values."""
    plan = checkpoint.plans[part]
    quantized = checkpoint.config.quantization is not None
    for name, source in plan.items():
        if source.decides_type:
            continue
        wanted = _FLOATS
        if name.endswith("scales"):
            wanted = _SCALES
        elif name.endswith("weight") and f"{name.removesuffix('weight')}scales" in plan:
            # Scales without quantization in config.json are refused elsewhere, with an error of their own.
            wanted = _PACKED if quantized else (*_FLOATS, *_PACKED)
        for stored in source.tensors:
            info = checkpoint.tensors[stored]
            if info.dtype not in wanted:
                raise CheckpointError(
                    f"{info.file}: tensor {stored} is stored as {info.dtype}; "
                    f"{' or '.join(wanted)} is needed. Use the checkpoint that its publisher has in BF16, or one "
                    "that mtp-coord convert made."
                )


def read_part(
    checkpoint: Checkpoint, part: str, dtype: mx.Dtype | None, *, shares: bool = False
) -> dict[str, mx.array]:
    """Return the lazy parameters of `part` by their name within it. Raises CheckpointError.

    With `shares` a member of a group reads only the bytes of its share, at once. Floating parameters and scales are
    cast to `dtype` (None: as stored), unless their rule is to keep their type.
    """
    if missing := checkpoint.missing_sources(part):
        raise checkpoint.missing_tensors_error(missing)
    check_types(checkpoint, part)
    config = checkpoint.config
    segments = config.family.segments(config.text_config)
    files: Files = {}
    weights: dict[str, mx.array] = {}
    for name, source in checkpoint.plans[part].items():
        stored = [checkpoint.load_tensor(tensor, files) for tensor in source.stored]
        made, rule = _make(checkpoint, source, stored), config.family.rule(part, name)
        share = share_of(f"{part}.{name}", rule.cut, made.shape, config.cut, segments, config.head_dim)
        if share is not None:
            if shares and source.transform is as_stored:
                pieces = _read_share(checkpoint, source.stored[0], share)
            else:
                pieces = share.slice_parameter(made)
            # Contiguous, since kernels would copy a view at each call.
            made = mx.contiguous(mx.concatenate(pieces, axis=share.axis))
        kind = made.dtype if source.decides_type else stored[0].dtype
        is_cast = dtype is not None and not rule.keeps_type and mx.issubdtype(kind, mx.floating)
        weights[name] = made.astype(dtype if dtype is not None and is_cast else kind)
    return weights


_NUMPY = {"F32": "f4", "F16": "f2", "BF16": "u2", "U32": "u4", "U8": "u1"}
"""The types in which numpy reads stored tensors. It has no bfloat16."""


def _read_share(checkpoint: Checkpoint, name: str, share: Share) -> list[mx.array]:
    """Return the pieces of a share of the stored tensor `name`. Reads the pages of the file that have them."""
    info = checkpoint.tensors[name]
    checkpoint.check_file(info.file)
    kind = np.dtype(_NUMPY[info.dtype]).newbyteorder("<")
    whole = np.memmap(info.file, kind, "r", offset=info.start, shape=info.shape)
    pieces = [mx.array(np.ascontiguousarray(piece)) for piece in share.slice_parameter(whole)]
    return [piece.view(mx.bfloat16) for piece in pieces] if info.dtype == "BF16" else pieces


def _make(checkpoint: Checkpoint, source: Source, stored: list[mx.array]) -> mx.array:
    try:
        return source.transform(*stored)
    except (ValueError, IndexError) as error:
        name = source.stored[0]
        raise CheckpointError(
            f"{checkpoint.tensors[name].file}: tensor {name} has shape {stored[0].shape}: {error}"
        ) from error


Norms = Literal["as they should be", "not shifted", "shifted twice"]

_OFF = 0.6
"""Difference of the means above which a shift is missing or doubled. A fault gives 1, a correct head up to .3."""


def head_norms(checkpoint: Checkpoint) -> Norms:
    """Return the verdict on the norms of a complete head. Reads a few vectors."""
    number = checkpoint.config.shape.twin
    if number is None or not checkpoint.config.family.has_raw_layout:
        return "as they should be"
    head, twin = _norm_means(checkpoint, "mtp", "layers.0."), _norm_means(checkpoint, f"layers.{number}", "")
    if not twin:  # a worker may have fetched the last layers only
        return "as they should be"
    difference = median(head[name] - twin[name] for name in head)
    # The raw offsets of the 27B's embedding norm are all negative, and would invert the sign of its input.
    embedding = read_part(checkpoint, "mtp", mx.float32)["pre_fc_norm_embedding.weight"]
    if difference < -_OFF or float(mx.max(embedding)) < 0:
        return "not shifted"
    return "shifted twice" if difference > _OFF else "as they should be"


def settle_norms(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the norms of its head read as weights, where the head has another layout than the model.

    A raw head beside a converted model gets the 1 that its norms lack, and a converted one beside a raw model none.
    """
    changes: dict[Norms, dict[Transform, Transform]] = {
        "not shifted": {as_stored: add_one},
        "shifted twice": {add_one: as_stored},
    }
    change = changes.get(head_norms(checkpoint), {})
    plan = {
        name: replace(source, transform=change.get(source.transform, source.transform))
        if _is_offset(checkpoint, "mtp", name)
        else source
        for name, source in checkpoint.plans["mtp"].items()
    }
    if plan == checkpoint.plans["mtp"]:
        return checkpoint
    return replace(checkpoint, plans={**checkpoint.plans, "mtp": plan})


def _is_offset(checkpoint: Checkpoint, part: str, name: str) -> bool:
    """Return whether a parameter is an RMSNorm whose raw weight is an offset from 1."""
    return checkpoint.config.family.rule(part, name).raw is add_one


def _norm_means(checkpoint: Checkpoint, part: str, prefix: str) -> dict[str, float]:
    """Return the mean of each norm of a layer, as the layer uses it, by its name within the layer."""
    weights = read_part(checkpoint, part, mx.float32)
    return {
        name.removeprefix(prefix): float(mx.mean(weight))
        for name, weight in weights.items()
        if name.startswith(prefix) and _is_offset(checkpoint, part, name)
    }


def report(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the object that `mtp-coord inspect --json` prints, with sizes in bytes on disk.

    `norms` is "raw" when RMSNorm weights are stored as offsets from 1. The tensors that the head lacks are under `mtp`.
    """
    config = checkpoint.config
    return {
        "model_type": config.model_type,
        "num_layers": config.num_layers,
        "layer_kinds": list(config.shape.kinds),
        "parameters": _parameters(checkpoint),
        "bytes": _bytes(checkpoint),
        "dtypes": _dtypes(checkpoint),
        "quantization": _quantization(checkpoint),
        "norms": _norms(checkpoint),
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_positions": config.max_positions,
        "mtp": {**asdict(checkpoint.mtp), "complete": checkpoint.mtp.complete},
        "unknown_tensors": list(checkpoint.unknown),
        "ignored_tensors": list(checkpoint.ignored),
        "missing_tensors": list(missing_from_backbone(checkpoint)),
    }


def _norms(checkpoint: Checkpoint) -> str:
    """Return how the weights of RMSNorm are stored: `as stored` for a family in which publishers do the same."""
    if not checkpoint.config.family.has_raw_layout:
        return "as stored"
    return "raw" if checkpoint.layout == "raw" else "shifted"


def _parameters(checkpoint: Checkpoint) -> int:
    """Count the weights of backbone and head in memory, before quantization. A tied lm_head counts once."""
    config = checkpoint.config
    modules = [config.backbone(), *([part_module(config, "mtp")] if checkpoint.mtp.complete else [])]
    return sum(w.size for m in modules for w in dict(tree_flatten(m.parameters())).values())


def _bytes(checkpoint: Checkpoint) -> dict[str, Any]:
    sizes = checkpoint.part_bytes()
    vision = sum(i.nbytes for name, i in checkpoint.tensors.items() if local_name(name) is None)
    ends = {part: sizes[part] for part in ("embed", "norm", "lm_head", "mtp")}
    layers = [sizes[f"layers.{layer}"] for layer in range(checkpoint.config.num_layers)]
    rows = checkpoint.disk_bytes
    total = sum(sizes.values())
    return {**ends, "layers": layers, "rows_on_disk": rows, "vision": vision, "total": total}


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes by stored dtype, largest first, without the vision part."""
    count: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        if local_name(name) is not None:
            count[info.dtype] += info.nbytes
    return dict(count.most_common())


def _quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the default bits and group size, and the overrides by module path; False is unquantized."""
    found = checkpoint.config.quantization
    if found is None:
        return None
    default = {"bits": found["bits"], "group_size": found["group_size"]}
    overrides = {
        local: value
        for path, value in found.items()
        if (value is False or isinstance(value, dict)) and (local := local_name(path))
    }
    return {**default, "mode": found.get("mode", "affine"), "overrides": overrides}
